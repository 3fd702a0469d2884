#!/bin/bash
# Check correctness, memory, speed, saving and multi-GPU training on a GPU. Without a GPU, they could only be derived or counted.
#
#   bash benchmarks/first_hour_on_gpu.sh [path/to/nanoGPT]      # about 50 minutes on one GPU; 10 more on several
#   bash benchmarks/first_hour_on_gpu.sh --smoke                # the same commands with tiny models on a CPU: one or two minutes
#
# On a GPU with less than 24 GB, put MICRO=16 before the command. On one older than Ampere, the two steps with bf16_residual fail.
# Each step prints its expected result, the end of its log and its exit code. All logs are kept in $OUT (default: runs/first_hour).
# Attach that folder and the new files of benchmarks/results/ to an issue or a pull request.
set -u
OUT=${OUT:-runs/first_hour}
PYTHON=${PYTHON:-.venv/bin/python}
SMOKE=false NANOGPT=
[ "${1:-}" = --smoke ] && SMOKE=true || NANOGPT=${1:-}
FAILED=()
mkdir -p "$OUT"

step() {  # NAME "expected result" command ...
    local name=$1 expected=$2 begin=$SECONDS code
    shift 2
    echo; echo "=== $name: expected: $expected"
    timeout 900 "$@" > "$OUT/$name.log" 2>&1; code=$?
    tail -n "${LINES_SHOWN:-8}" "$OUT/$name.log"
    echo "exit code $code after $((SECONDS - begin)) s"
    [ $code = 0 ] || FAILED+=("$name")
}
on_gpu() { if $SMOKE; then echo "=== $1: skipped, requires a GPU"; else step "$@"; fi; }
TRAIN="$PYTHON train_accelerate.py"

if $SMOKE; then
    TEXT="docs/log.md" VOCABULARY=300 STEPS=4 HALF=2
    SHAPE="--n_layer 1 --n_head 2 --n_embd 16 --n_positions 16 --learning_rate 1e-2 --tokens_per_step 64 --torch_compile false"
    MICRO=4 FP16=
else
    TEXT="python-standard-library" VOCABULARY=32000 STEPS=60 HALF=100
    SHAPE="--config presets/gpt2_small_seed.yaml"
    MICRO=${MICRO:-64} FP16="--mixed_precision fp16"
fi
BASE="--eval_strategy no --sample_tokens 0 --logging_steps 10 --overwrite_output_dir true"
UNSAVED="--data $OUT/store $SHAPE $BASE --warmup_steps 2 --save_strategy no"
SEED="$UNSAVED --max_steps $STEPS"
SAVING="--max_steps $((2 * HALF)) --save_strategy steps --save_steps $HALF"

$SMOKE || $PYTHON -m torch.utils.collect_env > "$OUT/environment.txt" 2>&1
command -v nvidia-smi > /dev/null && nvidia-smi > "$OUT/nvidia-smi.txt"

# ---- correctness
rm -rf "$OUT/store"
step store "a token store" $PYTHON -m tokenizer.pretokenize --input $TEXT --vocab_size $VOCABULARY --output "$OUT/store"
on_gpu tests "all tests pass, and the tests marked cuda (no synchronization in a step) are not skipped" $PYTHON -m pytest -q -n 4 --dist loadfile
step seed "a falling loss" $TRAIN $SEED --per_device_train_batch_size $MICRO --output_dir "$OUT/seed"
step accumulated "the losses of seed.log to two digits; with fp16, skipped steps only in the first lines" \
    $TRAIN $SEED $FP16 --per_device_train_batch_size $((MICRO / 2)) --output_dir "$OUT/accumulated"
RESUMED="--config presets/quickstart.yaml $BASE $SAVING --resid_pdrop 0.1"
$SMOKE && RESUMED="--data $OUT/store $SHAPE $BASE --warmup_steps 2 $SAVING"
step uninterrupted "checkpoints of both steps" $TRAIN $RESUMED --output_dir "$OUT/uninterrupted"
rm -rf "$OUT/resumed"; cp -r "$OUT/uninterrupted" "$OUT/resumed"
LAST=$(printf 'checkpoints/step_%08d' $((2 * HALF)))
rm -rf "$OUT/resumed/$LAST" "$OUT/resumed/model"
step resumed "resumed from step $HALF" $TRAIN --resume_from_checkpoint "$OUT/resumed"
step bitwise "no output: the weights are bitwise equal (if not, repeat with --full_determinism true)" \
    cmp "$OUT/uninterrupted/$LAST/model.safetensors" "$OUT/resumed/$LAST/model.safetensors"
on_gpu masked "a finished run" $TRAIN $SEED --mask_documents true --per_device_train_batch_size $MICRO --output_dir "$OUT/masked"
on_gpu checkpointing "a finished run" \
    $TRAIN $SEED --gradient_checkpointing true --per_device_train_batch_size $MICRO --output_dir "$OUT/checkpointing"
on_gpu bf16_residual "a finished run" $TRAIN $SEED --bf16_residual true --per_device_train_batch_size $MICRO --output_dir "$OUT/bf16_residual"
on_gpu out_of_memory "one sentence that suggests a smaller --per_device_train_batch_size, and exit code 1 of the run" \
    bash -c "! $TRAIN $SEED --tokens_per_step 4194304 --per_device_train_batch_size 8192 --output_dir $OUT/out_of_memory"
step generated "text" $PYTHON generate.py "$OUT/uninterrupted" --prompt "def " --max_new_tokens 20
on_gpu evaluated "bits per byte" $PYTHON -m training.evaluate "$OUT/uninterrupted"

# ---- memory
LINES_SHOWN=16 step plan "a measured peak within 10% of the estimate, under Memory" $TRAIN $SEED --plan --plan_steps 5
on_gpu auto "no line 'Out of memory'" $TRAIN $UNSAVED --max_steps 5 --output_dir "$OUT/auto"

# ---- speed and saving
LINES_SHOWN=30 on_gpu profile "a cudnn or flash kernel; the row 'no kernel' below 3%" \
    $TRAIN $UNSAVED --max_steps 12 --profile --output_dir "$OUT/profile"
on_gpu benchmark "ms per step: at most 48 on an H200, 58 on an H100; 0 recompiles, 0 graph breaks; the raw loop within 1% of ours" \
    $PYTHON -m benchmarks.train_step --preset gpt2_small_seed --sequences $MICRO --rounds 1 --windows 3 ${NANOGPT:+--nanogpt "$NANOGPT"}
for MODE in "" "--torch_compile_mode max-autotune-no-cudagraphs" "--bf16_residual true"; do
    on_gpu "speed${MODE// /_}" "tokens/s in the last line" \
        $TRAIN $UNSAVED --max_steps 80 --per_device_train_batch_size $MICRO $MODE --output_dir "$OUT/speed"
done
for CHOICE in true false; do
    on_gpu "quickstart_compiled_$CHOICE" "if false takes fewer seconds, auto should not compile runs as short as this" \
        $TRAIN --torch_compile $CHOICE --overwrite_output_dir true --output_dir "$OUT/quickstart_$CHOICE"
done
on_gpu mix_order "tokens/s, to compare with speed.log" env TORCHINDUCTOR_MIX_ORDER_REDUCTION=0 \
    bash -c "$TRAIN $UNSAVED --max_steps 80 --per_device_train_batch_size $MICRO --output_dir $OUT/speed"
on_gpu saving "seconds_copying below 0.2 in events.jsonl" bash -c \
    "$TRAIN --data $OUT/store $SHAPE $BASE --max_steps $STEPS --save_strategy steps --save_steps 20 --per_device_train_batch_size $MICRO --output_dir $OUT/saving && grep saving $OUT/saving/events.jsonl"

# ---- multi-GPU
GPUS=$(nvidia-smi -L 2> /dev/null | wc -l)
if ! $SMOKE && [ "$GPUS" -gt 1 ]; then
    for KIND in one_node fsdp2; do
        step $KIND "the losses of seed.log within 0.02" $PYTHON -m accelerate.commands.launch --quiet --config_file launch/$KIND.yaml --num_processes "$GPUS" \
            train_accelerate.py $SEED --per_device_train_batch_size $((MICRO / GPUS)) --output_dir "$OUT/$KIND"
    done
fi

echo
if [ ${#FAILED[@]} -gt 0 ]; then echo "Failed: ${FAILED[*]}. The logs are in $OUT."; exit 1; fi
echo "All steps ended with exit code 0. Compare their output with the expected results. The logs are in $OUT."
