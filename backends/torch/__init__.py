"""The local engine: a model in a process of its own, on torch and transformers.

In the gateway's process (imports no torch):

backend            the Backend: supervises the engine process, restarts it, streams its events
engine_client      starts the engine process; its commands, events and end
settings           the settings of a local model
model_files        finds the files of a model, and their task
weight_summary     what the files of a model say of its weights
packed_formats     how the weights of a checkpoint are quantized
prompt_lookup      likely next tokens, from earlier ones
ipc                messages between the two processes
commands           core requests to commands
events             events of the engine to core events

In the engine process:

engine_process     its main: reads commands, runs the engine's loop, ends with the gateway
engine             prefill and decode of many sequences together, one step at a time
scheduler          slots, memory and preemption
fair_queue         waiting prompts: fair turns between tenants
sequence           the engine's state of one request, one prompt and one choice
token_selection    from logits to events: sampling, log probabilities, ends of choices
sampling           the next token of each row by its own parameters; watermarks
beam_search        beam search over one group of beams
beam_sequences     the beams of a prompt as sequences, each with a KV cache
output_grammar     the grammar of an output: JSON Schema, regex, choices, tool calls
grammar_source     the text of a grammar
grammar_compiler   compiles grammars in threads; the tokens that one allows next
grammar_manager    requests that wait for their grammar; masks of logits
tool_calls         tool calls in conversations, as a template gets them
response_template  parsing of the output by a tokenizer's response template
kv_cache           blocks of keys and values: shared, cached, evicted
attention          attention of each row over its own past, independent of the batch
model              a packed forward pass over many rows
fused_layers       fused and prepacked layers
model_check        a check of the whole model at load, against the family's own attention
quantized_weights  layers whose weights stay quantized, with 4 or 8 bits
gguf_file          the tensors of a GGUF file
packed_checkpoint  the tensors of a GPTQ, AWQ or compressed-tensors checkpoint
loader             finds, downloads and loads models
gguf_conversion    converts GGUF files, once per content
device_memory      free memory of a device
loaded_model       a forward pass, a tokenizer and an input processor
tokenization       prompts to token ids; checks of parameters
detokenizer        tokens to text: whole characters, stop strings
embeddings         an encoder: vectors of texts
pooling            how an encoder's states become one vector
embedding_engine   the requests of an encoder, over the inputs of all together
rerank             cross-encoders: scores of documents for a query
classification     classifiers: the label of a text
"""
