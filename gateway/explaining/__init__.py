"""Explaining a request that nobody sent, by the very code that serves.

dry     serves it up to where it would be sent
wish    a question from little more than a model's name
sample  makes one up, in any dialect
text    an explanation for people
"""
