"""Profile: categories of kernels, complete accounting of time, and no effect on the run."""

import gzip
import json
import shutil

import pytest
from torch.autograd import DeviceType
from torch.autograd.profiler_util import FunctionEvent

from conftest import assert_same_run
from training.log.profile import account, classify, summarize_profile, table

CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_cga1x1x1_kernel0_0"
ADAMW = "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>>"
KERNELS = {
    "matmul": """aten::mm aten::addmm aten::linear mkldnn::_linear_pointwise triton_tem_fused_addmm_7
        nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNT ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn
        sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1""".split()
    + ["void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_256x128_32x3_tn_align8>"],
    "attention": """aten::bmm aten::baddbmm aten::_softmax_backward_data triton_tem_fused_flex_attention_0
        aten::_scaled_dot_product_flash_attention_for_cpu cudnn::fusion::compute_dot_do_o_specialized
        graph_0_cpp_fused__safe_softmax_add_native_dropout_scalar_tensor_view_where_3
        fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel)""".split()
    + [CUDNN, "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, cutlass::bfloat16_t>>"],
    "loss": """aten::_log_softmax aten::nll_loss_forward aten::cross_entropy_loss graph_0_cpp_fused_exp_logsumexp_sub_4
        graph_0_cpp_fused__log_softmax_nll_loss_forward_3 triton_red_fused__log_softmax_nll_loss_forward_3""".split()
    + ["void at::native::(anonymous namespace)::cunn_SoftMaxForward<LogSoftMaxForwardEpilogue>"],
    "optimizer": ["aten::_fused_adamw_", ADAMW],
    "elementwise": """aten::native_layer_norm aten::expand graph_0_cpp_fused_add_native_layer_norm_mm_view_1
        graph_0_cpp_fused__scaled_dot_product_flash_attention_for_cpu_backward_sum_transpose_view_4
        triton_poi_fused_gelu_2""".split()
    + ["void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl>"],
    "communication": """gloo:all_reduce c10d::_allgather_base_
        ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096>)""".split(),
    "copies": ["Memcpy HtoD (Pinned -> Device)", "Memset (Device)"],
}


@pytest.mark.parametrize(("category", "name"), [(category, name) for category in KERNELS for name in KERNELS[category]])
def test_kernels_and_operators_are_classified_by_name(category, name):
    assert classify(name) == category


def event(name: str, start: float, end: float, parent: FunctionEvent | None = None, **options) -> FunctionEvent:
    child = FunctionEvent(0, name, 1, start, end, **options)
    if parent is not None:
        parent.append_cpu_child(child)
        child.set_cpu_parent(parent)
    return child


def test_device_time_is_that_of_kernels_and_copies_get_the_rest():
    """Two steps that take 1,000 us together."""
    gpu = {"device_type": DeviceType.CUDA}
    copy, collective = "Memcpy HtoD (Pinned -> Device)", "ncclDevKernel_AllReduce"
    events = [
        event("data", 0, 100),
        event("aten::mm", 200, 900),  # only launches kernels
        event("optimizer", 600, 1000, is_user_annotation=True, **gpu),  # the range, in the device's stream
        event("nvjet_hsh", 0, 300, **gpu),
        event(CUDNN, 300, 500, **gpu),
        event(collective, 300, 600, **gpu),
        event(copy, 500, 600, **gpu),
        event(ADAMW, 600, 900, **gpu),
    ]
    times = account(events, 1000)
    assert times == {
        ("matmul", "nvjet_hsh"): 300,
        ("attention", CUDNN): 200,
        ("optimizer", ADAMW): 300,
        ("communication", collective): 150,  # three quarters of 200 us
        ("copies", copy): 50,
        ("idle", "idle"): 0,
    }
    summary = summarize_profile(times, 1000, 4, 5)
    categories = {"matmul": 0.15, "attention": 0.1, "optimizer": 0.15, "copies": 0.025, "communication": 0.075}
    assert (summary["step_ms"], summary["ms"], summary["attention"]) == (0.5, categories, [CUDNN])
    assert account(events, 2000)["idle", "idle"] == 800
    text = table(summary).splitlines()
    assert text[4:6] == ["        0.03 ms   5.0%  copies", "        0.07 ms  15.0%  communication"]
    assert text[9] == f"        0.15 ms  30.0%  optimizer     {ADAMW[:45]}…{ADAMW[-26:]}"
    assert text[-1] == f"Attention ran in {CUDNN}."


def test_cpu_time_counts_for_the_innermost_operator():
    data, linear, optimizer = event("data", 0, 100), event("aten::linear", 120, 200), event("optimizer", 600, 700)
    events = [data, event("aten::stack", 10, 90, data), linear, event("aten::addmm", 130, 190, linear), optimizer]
    events += [event("gloo:all_reduce", 450, 550, is_async=True), event("aten::mul_", 620, 650, optimizer)]
    assert account(events, 700) == {
        ("data", "data"): 100,
        ("matmul", "aten::linear"): 20,
        ("matmul", "aten::addmm"): 60,
        ("communication", "gloo:all_reduce"): 100,
        ("optimizer", "aten::mul_"): 30,
        ("host", "host"): 390,
    }


def summary_of(run) -> dict:
    return json.loads((run / "profile" / "summary.json").read_text())


def assert_adds_up(summary: dict) -> None:
    assert sum(summary["ms"].values()) == pytest.approx(summary["step_ms"], abs=0.001)
    assert {"data", "matmul", "attention", "elementwise", "loss", "optimizer", "host"} <= summary["ms"].keys()


def test_profiling_does_not_change_the_run(train, tmp_path, capsys):
    settings = {"per_device_train_batch_size": 2, "resid_pdrop": 0.1}
    plain = train(tmp_path / "plain", **settings)
    run = train(tmp_path / "run", "--profile", **settings)
    assert_same_run(plain, run)

    summary, path = summary_of(run), run / "profile" / "trace.json.gz"
    assert (summary["first_step"], summary["last_step"]) == (4, 6)
    assert_adds_up(summary)
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in summary["attention"]
    assert f"{table(summary)}\nTrace: {path}; " in capsys.readouterr().out
    trace = json.loads(gzip.decompress(path.read_bytes()))
    names = [event.get("name") for event in trace["traceEvents"]]
    assert {"data", "forward", "backward", "optimizer", "aten::addmm"} <= set(names)
    assert names.count("backward") == 3 * 2  # steps, micro-batches
    assert "profile" not in (run / "config.yaml").read_text()  # a resumed run does not profile again


def test_a_resumed_run_is_profiled_from_its_start(train, tmp_path, capsys):
    run, settings = tmp_path / "run", {"eval_strategy": "no", "save_steps": 20}
    train(run, max_steps=2, **settings)
    resume = ("--resume_from_checkpoint", str(run), "--profile")
    train(run, *resume, max_steps=9, **settings)
    summary = summary_of(run)
    assert (summary["first_step"], summary["last_step"]) == (6, 8)
    train(run, *resume, max_steps=11, **settings)
    assert "Nothing was profiled: the run ended before step 15, the last to record." in capsys.readouterr().out
    assert summary_of(run) == summary


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_kernels_are_named(train, tmp_path):
    summary = summary_of(train(tmp_path / "run", "--profile", torch_compile="true", n_layer=1, eval_strategy="no"))
    assert_adds_up(summary)
    kernels = [kernel for kernel in summary["kernels"] if "cpp_fused_" in kernel["name"]]
    assert {kernel["category"] for kernel in kernels} == {"elementwise", "loss"}
