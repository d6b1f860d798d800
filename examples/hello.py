"""Ask the default model a question; print its answer, and the log-probability of each token."""

from nano_inference import EngineConfig, InferenceEngine, SamplingParams
from nano_inference.text.chat import encode_chat, load_chat_template
from nano_inference.text.tokenizer import load_tokenizer

with InferenceEngine(EngineConfig(model_path="default")) as engine:
    files = engine.parts.checkpoint.tokenizer
    tokenizer = load_tokenizer(files)
    template = load_chat_template(files, tokenizer)
    question = {"role": "user", "content": "What is the capital of France?"}
    prompt = encode_chat(template, tokenizer, [question])  # token ids
    (sample,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=32))

print(tokenizer.decode(sample.completion_tokens))
for token, logprob in zip(sample.completion_tokens, sample.logprobs, strict=True):
    print(f"{logprob:8.4f}  {tokenizer.decode([token], skip_special=False)!r}")
