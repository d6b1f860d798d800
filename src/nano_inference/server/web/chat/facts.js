/** The answer of `/info` as sentences. */

function listed(values) {
  const named = Object.entries(values ?? {}).filter(([, value]) => value !== null);
  return named.map(([name, value]) => `${name.replaceAll("_", "-")} ${value.toLocaleString("en")}`).join(", ");
}

function millions(count) {
  return count >= 1e9 ? `${(count / 1e9).toFixed(1)} billion` : `${(count / 1e6).toFixed(1)} million`;
}

/** Return sentences about the served model; fields that an older server lacks are left out. */
export function sentences(info) {
  if (!info) return ["The server has not been reached."];
  const number = (value) => value.toLocaleString("en");
  const made = info.model_context > info.context ? `; the model supports ${number(info.model_context)}` : "";
  const layers = info.layers ? ` with ${info.layers} layers` : "";
  const size = info.parameters ? ` and ${millions(info.parameters)} parameters` : "";
  const files = info.file_precision ? `, stored as ${info.file_precision}` : "";
  const other = (info.names ?? []).filter((name) => name !== info.model);
  return [
    `${info.model} is served by ${info.server}${other.length ? `, also under the name ${other.join(", ")}` : ""}.`,
    info.architecture && `It is a ${info.architecture}${layers}${size}${files}.`,
    info.generation && `It was recognised as ${info.generation}.`,
    `Prompt and answer together can have ${number(info.context)} tokens${made}.`,
    info.chats ? "It has a chat template, so it can chat." : "It has no chat template: it continues texts.",
    info.calculator && "It can call a calculator.",
    `It runs on ${info.device ?? "the server"} with precision ${info.dtype}.`,
    info.kernels && `Its kernels: ${info.kernels}.`,
    info.max_running && `Up to ${number(info.max_running)} answers are generated at once.`,
    info.kv_tokens && `The KV cache holds ${number(info.kv_tokens)} tokens.`,
    `One request can have at most ${info.max_n} samples, and ${info.max_logprobs} alternatives for each token.`,
    info.chat_defaults
      && `Chats here use ${listed(info.chat_defaults)}; temperature and truncation: ${info.chat_defaults_source}.`,
    info.sampling_defaults && `Other requests default to ${listed(info.sampling_defaults)}.`,
  ].filter(Boolean);
}
