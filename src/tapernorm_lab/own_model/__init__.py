"""`tapernorm taper`, from its options to its export. The modules stand in the order in which they run.

    cli/own_model.py              adds the options, and prints the outcome
    own_model/options.py          Request: the options as typed; `check` refuses what is wrong whatever the model
    own_model/job.py              TaperJob: the settings that define the numbers, with defaults by model size
    own_model/resolve.py          TaperRun: all decisions of a run; everything below reads this in place of the options
    own_model/dry_run.py          --dry-run: norms, scales and settings as text
    own_model/scale_warnings.py   warnings of norms that one constant cannot replace
    own_model/own_text.py         texts into blocks; a dry run only checks the texts
    own_model/taper_own_model.py  the recipe: text, training, scores, export
    own_model/train.py            the model, its taper and the plan of its training
    training/run_folder.py        trains, and puts the model into the run folder
    training/trainer.py           the loop over optimizer steps
    own_model/scores.py           losses of the base model and of the folded model
    own_model/export_run.py       the export, its forms and its model card

A run passes through twelve of these modules, a dry run through seven. They call the library and the rooms `data` and
`training`, which know no option of a taper. `scales_before_after` measures a finished run.
"""
