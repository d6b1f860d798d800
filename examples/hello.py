"""Ask the default model a question; print its answer, and the log-probability of each token."""

from nano_inference import InferenceEngine, SamplingParams

with InferenceEngine("default") as engine:
    question = {"role": "user", "content": "What is the capital of France?"}
    sample = engine.chat([question], SamplingParams(temperature=0, max_tokens=32))

print(sample.text)
for token, logprob in zip(sample.completion_tokens, sample.logprobs, strict=True):
    print(f"{logprob:8.4f}  {engine.tokenizer.decode([token], skip_special=False)!r}")
