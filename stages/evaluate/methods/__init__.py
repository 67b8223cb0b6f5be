"""One module a method: its `Params` (the method's section of params.yaml) and `build(params, drafter) -> Method`."""
