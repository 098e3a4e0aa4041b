"""HTTP: OpenAI's, Anthropic's and Ollama's APIs, editors' end points and a chat page on one engine.

Knows: the wire formats, who may call, which models are loaded. Does not know how tokens are computed.
"""
