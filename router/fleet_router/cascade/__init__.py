"""Small models first: a smaller tier's draft is held and judged, and a larger tier is asked where it is not good enough.

`judge` and `reading` are pure; `draft` is the flow of one held answer, `climb` one request's way through the tiers.
"""
