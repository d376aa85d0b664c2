"""Other APIs than OpenAI's chat, spoken by translating to it and back: Anthropic's Messages and OpenAI's Responses.

Workers only ever see chat requests, so that every engine serves every dialect, and prefill and decode are split for all of them.
Translation reads each chunk's JSON; the native paths never do.
"""
