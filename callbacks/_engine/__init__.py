"""The ground floor under the callbacks, in four parts, each to be read alone.

`record` keeps what a step did at the places that were asked for; `pair` makes views of the same samples from it;
`replay` runs a recorded call again; `report` hands values, pictures and files on. `places` finds submodules by path;
`action` is what the callbacks that act on a predictor share.
"""
