"""Where the time of a step goes: what kernels are for, that all time is accounted for, and that looking changes nothing."""

import gzip
import json
import shutil

import pytest

from conftest import assert_same_run
from training.profile import Event, account, summarize, table

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


def host(name: str, start: float, end: float) -> Event:
    return Event(name, start, end, on_device=False)


def device(name: str, start: float, end: float) -> Event:
    return Event(name, start, end, on_device=True)


def test_time_on_a_device_goes_to_its_kernels_and_its_gaps():
    """Two steps, of 1,000 us together; what lies outside of them does not count."""
    events = [
        device("nvjet_before", -100, 50),
        host("data", 50, 200),
        host("aten::mm", 200, 900),  # launches only
        device("Memcpy HtoD (Pinned -> Device)", 180, 190),
        device("nvjet_hsh", 200, 300),
        device(CUDNN, 310, 400),  # 10 us after: a launch
        device("triton_poi_fused_gelu_2", 430, 500),  # 30 us after: the host was late
        device("ncclDevKernel_AllReduce", 450, 600),  # 50 us hidden, 100 not
        device("optimizer", 600, 800),  # the range, as the device's own stream has it
        device(ADAMW, 600, 700),
        device("void at::native::reduce_kernel<512, 1>", 705, 800),
        device("triton_red_fused__log_softmax_nll_loss_forward_3", 800, 1100),
    ]
    spent = account(events, 0, 1000)
    assert spent == {
        ("matmul", "nvjet_before"): 50,
        ("data", "data"): 140,  # 50 to 200, but for the copy
        ("copies", "Memcpy HtoD (Pinned -> Device)"): 10,
        ("matmul", "nvjet_hsh"): 100,
        ("attention", CUDNN): 90,
        ("host", "host"): 30,
        ("idle", "idle"): 15,  # 10 and 5
        ("elementwise", "triton_poi_fused_gelu_2"): 70,
        ("communication", "ncclDevKernel_AllReduce"): 100,
        ("optimizer", ADAMW): 100,
        ("optimizer", "void at::native::reduce_kernel<512, 1>"): 95,
        ("loss", "triton_red_fused__log_softmax_nll_loss_forward_3"): 200,
    }
    summary = summarize(spent, 4, 5)
    assert summary["step_ms"] == 0.5
    computed = {"matmul": 0.075, "attention": 0.045, "elementwise": 0.035, "loss": 0.1, "optimizer": 0.0975}
    waited = {"data": 0.07, "copies": 0.005, "communication": 0.05, "host": 0.015, "idle": 0.0075}
    assert summary["ms"] == computed | waited
    assert summary["attention"] == [CUDNN]
    shown = table(summary).splitlines()
    assert shown[0] == "Where the time of a step went (steps 4 to 5):"
    assert shown[1] == "        0.07 ms  14.0%  data"
    assert shown[11] == "        0.50 ms 100.0%  a step"
    assert shown[-1] == f"Attention ran in {CUDNN}."


def test_time_on_a_cpu_goes_to_the_innermost_operator_that_is_named():
    events = [
        host("data", 0, 100),
        host("aten::stack", 10, 90),
        host("Torch-Compiled Region: 0/0", 100, 400),
        host("aten::linear", 120, 200),
        host("aten::transpose", 120, 130),
        host("aten::addmm", 130, 190),
        host("graph_0_cpp_fused_gelu_view_2", 200, 260),
        host("aten::matmul", 260, 300),
        host("aten::bmm", 270, 300),
        host("autograd::engine::evaluate_function: AddmmBackward0", 400, 500),
        host("aten::mm", 410, 480),
        host("gloo:all_reduce", 450, 550),
        host("optimizer", 600, 700),
        host("aten::mul_", 620, 650),
    ]
    assert account(events, 0, 700) == {
        ("data", "data"): 100,
        ("host", "host"): 20 + 100 + 10 + 50 + 20 + 50,
        ("matmul", "aten::linear"): 20,
        ("matmul", "aten::addmm"): 60,
        ("elementwise", "graph_0_cpp_fused_gelu_view_2"): 60,
        ("elementwise", "aten::matmul"): 10,
        ("attention", "aten::bmm"): 30,
        ("matmul", "aten::mm"): 70,
        ("communication", "gloo:all_reduce"): 70,  # while nothing else ran
        ("optimizer", "aten::mul_"): 30,
    }


def summary_of(run) -> dict:
    return json.loads((run / "profile" / "summary.json").read_text())


def assert_adds_up(summary: dict) -> None:
    assert sum(summary["ms"].values()) == pytest.approx(summary["step_ms"], abs=0.001)
    assert {"data", "matmul", "attention", "elementwise", "loss", "optimizer", "host"} <= summary["ms"].keys()


def test_a_profile_changes_no_number_of_the_run(train, tmp_path, capsys):
    settings = {"per_device_train_batch_size": 2, "resid_pdrop": 0.1}
    plain = train(tmp_path / "plain", **settings)
    capsys.readouterr()
    run = train(tmp_path / "run", "--profile", **settings)
    said = capsys.readouterr()
    assert_same_run(plain, run)

    summary = summary_of(run)
    assert (summary["first_step"], summary["last_step"]) == (4, 6)
    assert_adds_up(summary)
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in summary["attention"]
    assert table(summary) in said.out
    assert f"The trace is {run / 'profile' / 'trace.json.gz'}; open it at https://ui.perfetto.dev." in said.out
    trace = json.loads(gzip.decompress((run / "profile" / "trace.json.gz").read_bytes()))
    names = [event.get("name") for event in trace["traceEvents"]]
    assert {"recorded steps", "data", "forward", "backward", "optimizer", "aten::addmm"} <= set(names)
    assert names.count("backward") == 4 * 2  # steps, of which the first is one under way; micro-batches
    assert "profile" not in (run / "config.yaml").read_text()  # a resumed run does not profile again


def test_a_resumed_run_is_profiled_from_where_it_starts(train, tmp_path, capsys):
    run = train(tmp_path / "run", max_steps=2, eval_strategy="no")
    train(run, "--resume_from_checkpoint", str(run), "--profile", max_steps=9, eval_strategy="no", save_steps=20)
    summary = summary_of(run)
    assert (summary["first_step"], summary["last_step"]) == (6, 8)
    train(run, "--resume_from_checkpoint", str(run), "--profile", max_steps=11, eval_strategy="no")
    assert "Nothing was profiled: the run ended before step 15, the last to record." in capsys.readouterr().out
    assert summary_of(run) == summary
    train(run, "--overwrite_output_dir", max_steps=1)
    assert not (run / "profile").exists()


def test_attention_written_out_and_a_profile_that_a_checkpoint_ends(train, tmp_path):
    run = train(tmp_path / "run", "--profile", attn_implementation="eager", save_steps=1, eval_strategy="no")
    summary = summary_of(run)
    assert (summary["first_step"], summary["last_step"]) == (4, 4)
    assert_adds_up(summary)
    assert {"aten::bmm", "aten::_softmax", "aten::_softmax_backward_data"} <= set(summary["attention"])


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_compiled_kernels_have_names(train, tmp_path):
    summary = summary_of(train(tmp_path / "run", "--profile", torch_compile="true", n_layer=1, eval_strategy="no"))
    assert_adds_up(summary)
    compiled = [kernel for kernel in summary["kernels"] if "cpp_fused_" in kernel["name"]]
    assert {kernel["category"] for kernel in compiled} == {"elementwise", "loss"}
