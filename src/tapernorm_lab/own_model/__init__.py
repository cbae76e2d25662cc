"""`tapernorm taper`, from the options to the export, in the order in which its files are read.

    cli/own_model.py              the option names, and what is printed in the end
    own_model/options.py          Request: what was asked for; `check` refuses what needs no model to be refused
    own_model/job.py              TaperJob: what defines the numbers, with defaults by the model's size
    own_model/resolve.py          TaperRun: all that will be done; everything below reads this, and no option again
    own_model/dry_run.py          --dry-run ends here: norms, scales and settings as text
    own_model/scale_warnings.py   the norms that one constant cannot stand for; a run warns of them too
    own_model/own_text.py         the texts into blocks, or only checked, by a dry run
    own_model/taper_own_model.py  the recipe: text, training, scores, export
    own_model/train.py            the model, its taper and the plan of its training
    training/run_folder.py        the trained model is published into the run folder
    training/trainer.py           the loop over optimizer steps
    own_model/scores.py           losses of the base model and of the folded one
    own_model/export_run.py       the export, its forms and its model card

A run passes twelve of these, a dry run seven. Behind them lie the library (load, attach, fold, save) and the rooms data
and training, which know nothing of a taper's options. `scales_before_after` measures a run that is finished.
"""
