"""The local engine: a model in a process of its own, through torch and transformers.

client      the gateway's side: starts the process, is the Backend; imports no torch
mapping     core requests to messages, messages to core events
spec        the messages between the two processes, and their frames
process     one life of the engine's process, from the gateway's side
settings    what the configuration may say
worker      the process's main: reads frames, steps the engine, dies with the gateway
engine      prefill and decode of many rows together, one step at a time
scheduler   who waits, is read, has a row: places, memory, order
queueing    the line of those that wait, in fair turns between tenants
choosing    from logits to what is told
rows        what one request, one prompt and one choice are to the engine
counting    what the engine has done so far, in figures
assembly    a forward pass, a tokenizer and a reader, made one model
forward     one packed pass of transformers' model over many rows
kv          the memory of keys and values: blocks, shared, kept and forgotten
attention   each row over its own past, the same whatever is beside it
linear      linear layers whose rows do not depend on how many there are
capped      attention written out, for families with soft caps or sinks
sampler     which token comes next, for each row by its own rules
text        tokens to text: never half a character, never a stop string
reading     what a request means to this model: token ids and rules
offers      the form of an answer and what it may call, from a core request
families    how families of models write calls, and are told of functions
forms       the grammar of an answer: its form, and the calls it may make
grammar     what may come next after a grammar; compiled aside and kept
guiding     jobs whose answers have a form, and what it leaves their rows
speech      text as it comes, taken apart into what is said and what is called
embed       vectors of texts
recipe      how a model's vectors are made, by the files beside it
models      where a model lies: a folder, a package, the hub
conversion  a GGUF file made a folder, once
loading     weights and tokenizers loaded; what does not fit is told before
"""
