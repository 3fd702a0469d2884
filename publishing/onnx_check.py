"""Run an ONNX file with onnxruntime. onnx_file.py starts this as a process of its own.

python onnx_check.py model.onnx            # reads request.npz, writes answer.npz
"""

import sys

import numpy as np
import onnxruntime


def run(session: onnxruntime.InferenceSession, ids: np.ndarray, past: list[np.ndarray]) -> list[np.ndarray]:
    """Return logits (1, T, V), and keys and values, for ids (1, T) after the tokens in `past`."""
    mask = np.ones((1, past[0].shape[2] + ids.shape[1]), np.int64)
    names = [entry.name for entry in session.get_inputs()]
    return session.run(None, dict(zip(names, [ids, mask, *past], strict=True)))


def greedy(session: onnxruntime.InferenceSession, prompt: np.ndarray, past: list[np.ndarray], number: int) -> list[int]:
    """Return the most likely tokens after a prompt (1, P), one at a time with cached keys and values."""
    tokens: list[int] = []
    for _ in range(number):
        logits, *past = run(session, np.array([tokens[-1:]]) if tokens else prompt, past)
        tokens.append(int(logits[0, -1].argmax()))
    return tokens


def loss(logits: np.ndarray, targets: np.ndarray) -> float:
    """Return the mean loss in nats of logits (T, V) for targets (T,)."""
    logits = logits - logits.max(1, keepdims=True)
    return float((np.log(np.exp(logits).sum(1)) - logits[np.arange(len(targets)), targets]).mean())


def main(file: str) -> None:
    session, request = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"]), np.load("request.npz")
    shapes = [entry.shape for entry in session.get_inputs()[2:]]
    empty = [np.zeros((1, heads, 0, width), np.float32) for _, heads, _, width in shapes]
    probe, texts, number = request["probe"], request["texts"], int(request["new_tokens"])
    whole, (_, *past) = run(session, probe, empty)[0][0], run(session, probe[:, :-1], empty)
    end = run(session, probe[:, -1:], past)[0][0]
    np.savez(
        "answer.npz",
        logits=np.concatenate([whole, end]),  # (T + 1, V): of the probe, and of its last token with a cache
        tokens=np.array([greedy(session, text[None, :-number], empty, number) for text in texts]),
        loss=np.mean([loss(run(session, row[None], empty)[0][0, :-1], row[1:]) for row in request["scored"]]),
    )


if __name__ == "__main__":
    main(sys.argv[1])
