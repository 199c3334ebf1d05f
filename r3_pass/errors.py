"""The errors that a user of r3_pass can meet, one family under `R3Error`.

    try:
        rows = session.finish("request-7", num_tokens=96)
    except r3_pass.MissingRoutes:
        ...                                  # this request's routing is incomplete: do not train on it
    except r3_pass.R3Error:
        ...                                  # anything else that this library refused

A message says what happened, where, what was expected and found, and what to do next. Nothing is skipped, guessed
or padded in silence: what cannot be recorded in full is one of these.
"""


class R3Error(Exception):
    """Base of the family: `except r3_pass.R3Error` catches all that this library raises about routing.

    A call with arguments that make no sense by themselves (a negative length, say) is a plain `ValueError`.
    """


class RefusedConfiguration(R3Error):
    """The model, the engine's options or the call cannot be recorded as they are.

        Layer 3 holds two routed MLPs (layers.3.mlp, layers.3.mlp2); a row of routed_experts has room for one per
        layer.

    Raised at start-up where the facts are known by then (`backend`, `attach`), else at the call that shows them.
    Nothing has been written yet. What to do: change the option or the call that the message names.
    """


class NoRouterFound(R3Error):
    """No MoE router in anything that was compiled.

        No routing site in 4 graphs; 1 candidate was rejected. Run r3_pass.explain(model, ...) to see it.

    Raised by `attach`, or at the end of the first step. The model is dense, its MoE layers fell back to eager (a
    graph break, a disabled region), or its routers have a form that no registered one matches. What to do: compile
    the MoE layers, read `r3_pass.explain(...)`, or register a form.
    """


class PartialCapture(R3Error):
    """Some MoE layers are captured and others are not.

        47 of 48 MoE layers are captured in graph 2. Layer 12: rejected by softmax_topk: the top-k values have no
        path from a linear with 128 outputs. Run r3_pass.explain(model, ...) for every candidate, or register a
        form.

    Raised at the end of the first step, before any row is returned, and at any later step in which the graph of an
    expected layer did not run. What to do: the message names each layer and why; `r3_pass.explain(...)` lists every
    candidate.
    """


class MissingRoutes(R3Error):
    """Rows that were asked for, or that a segment should continue, do not exist.

        Request 'request-7': position 64 comes next, the segment starts at 80. Report what a prefix cache skipped with
        prefix_hit(request_id, start, slots) before the step.

    Raised by `step` (a gap) and by `finish` (a row is missing, or the request is unknown). A request that
    lacks rows stays registered, so `abort` still returns the prefix that it has. What to do: report every skipped
    token, and every move of its slots.
    """


class StaleRoutes(R3Error):
    """The row of a slot belongs to another owner than the one that asks for it.

        Request 'request-9', position 32: slot 517 was assigned to a new owner and has not been written since.

    Raised by `prefix_hit` if the host knows it by then, at the latest by `finish`. The order of `assign`, `move`,
    `prefix_hit` and `step` is not that of the engine's cache. What to do: drop the request's rows and run its
    prefix again.
    """


class UnsupportedEngine(R3Error):
    """`attach` has no adapter for this engine, or none for its version or mode.

        No adapter knows a 'MyEngine' (known: transformers continuous batching, compiled modules). Drive the steps
        yourself with attach(compiled_model, num_slots=...), or write an adapter on r3_pass.runtime.engines.base.

    Raised by `attach`, before anything is changed.
    """


class BufferLayoutError(R3Error):
    """The slot buffer cannot hold what would be written to it.

        Layer 0 routes over 40000 experts; the slot buffer is int16 and holds ids up to 32767.

    Raised where the buffer is laid out, bound or written: more experts than the dtype holds, a layer or a column
    that its shape lacks, a buffer of another dtype, layout or device. What to do: size it from the session's own
    geometry.
    """


class InvalidRoutes(R3Error):
    """Routes that were given to replay cannot be those of this forward.

        layer 3 (routes[..., 3, :]): row 17 has an expert twice: [64, 64]; 1 of 96 rows are bad. No router chose that: look at where
        the rows come from (padding is -1), or pass on_bad_row='live' to leave such rows to the live router.

    Raised by `backend.replay(routes)`, by the forward inside it, and by the helpers of `r3_pass.routes`. What to do: look at where
    the rows come from; an empty capture, another tokenisation, shifted or padded rows.
    """
