#!/bin/bash
# One machine of a Slurm cluster. The job saves and stops before its time limit, goes back to the queue, and resumes there.
#
#   sbatch launch/slurm.sh --config presets/gpt2.yaml --data data/my
#
# Submit it from the clone, on a disk that all machines share, because the run folder is in it. Set the resources here or by flags
# of sbatch. With one GPU or none, replace the training command by `python train_accelerate.py "$@" &`.
#SBATCH --nodes=1 --ntasks=1
#SBATCH --gpus-per-node=4 --cpus-per-task=16 --mem=64G
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@300
#SBATCH --requeue --open-mode=append

source .venv/bin/activate
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=240 # seconds to save, of the 300 before the time limit

# Training saves at SIGTERM. USR1 would kill it, so Slurm sends USR1 to this shell only (B:). SIGTERM comes from scancel or from
# preemption: then the job is not requeued here, because Slurm does that if it preempts. Without a trap, either signal would end
# this shell and leave the training behind, so both traps are set before it starts.
requeue=
trap 'requeue=yes; kill -TERM $!' USR1
trap '[ -z "$!" ] && exit 143; kill -TERM $!' TERM

case " ${*//-/_}" in *" __overwrite_output_dir"*) # a job that is requeued repeats its command
    echo "error: A requeued job would replace its own run: leave out --overwrite_output_dir, and name a new --output_dir." >&2
    exit 1 ;;
*" __output_dir"*) ;;
*" __resume_from_checkpoint"*"/checkpoints/step_"*)
    echo "error: A requeued job would be refused, because the run has later checkpoints: name the run's folder, or a new --output_dir." >&2
    exit 1 ;;
esac

accelerate launch --quiet --config_file launch/one_node.yaml --num_processes "$SLURM_GPUS_ON_NODE" train_accelerate.py "$@" &
run=$!

wait "$run"
code=$?
while kill -0 "$run" 2> /dev/null; do # a signal ended the wait, but not yet the run
    wait "$run"
    code=$?
done

if [ -n "$requeue" ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
