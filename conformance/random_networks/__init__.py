"""Random networks: JSON programs that hypothesis draws, each cut everywhere, replayed and trained beside the whole model.

In import order::

    extent           how far each program is tried
    outside          what steps read beside the network
    scripted_steps   steps that call functions under `torch.jit.script`
    python_steps     steps whose Python no graph shows
    beyond_steps     steps with tensors that are not torch's own, and with data that leave torch
    torch_steps      steps that are more than one op to a capture, or of which no op shows anything
    given_steps      steps with what a call is given beside tensors
    held_steps       steps that reach a network beside its attributes, and read what stands outside of it
    steps, parts     the closed vocabulary: what a program can do, and the modules that it can hold
    program          a program as data, as a module, and as inputs
    compare          equal, bit for bit
    draw             programs from hypothesis, valid by construction
    twins, counts    a model beside its split twin; what was compared
    tally            what a run counted
    around           what is around a call: threads, autocast, kept weights, files
    changes          what changes between calls: things outside, keywords, weights that are assigned
    session, trial   what a user does over time; one program held against every promise
    corpus           programs that failed once
    search           a run of hypothesis that keeps what fails
"""
