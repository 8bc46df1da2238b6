"""The local engine: a model in a process of its own, through torch and transformers.

client      the gateway's side: starts the process, is the Backend; imports no torch
mapping     core requests to messages, messages to core events
spec        the messages between the two processes, and their frames
process     one life of the engine's process, from the gateway's side
settings    what the configuration may say
worker      the process's main: reads frames, steps the engine, dies with the gateway
engine      admission, prefill and decode of many rows together, one step at a time
rows        what one request, one prompt and one choice are to the engine
assembly    a forward pass, a tokenizer and a reader, made one model
forward     one packed pass of transformers' model over many rows
sampler     which token comes next, for each row by its own rules
text        tokens to text: never half a character, never a stop string
reading     what a request means to this model: token ids and rules
embed       vectors of texts
models      where a model lies; GGUF is converted once
"""
