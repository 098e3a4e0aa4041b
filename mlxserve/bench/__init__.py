"""Measures a model in this process, or any OpenAI endpoint, as its clients see it.

`scenarios` says what is asked, `target` who answers, `measure` runs one against the other, `figures` turns
what was seen into numbers, `report` and `chart` put the numbers down. Nothing here knows a terminal.
"""
