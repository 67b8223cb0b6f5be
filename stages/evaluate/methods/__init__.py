"""One module a method.

`RULE`, its `Params` (the method's section of params.yaml) and `build(params, drafter) -> Method`.
"""
