"""What `import tapernorm` offers."""

import subprocess
import sys

import pytest

import tapernorm

CONTRACT = "attach fold load export interop spread Taper TaperCallback GateSchedule Decoder UserError"
NAMES = f"{CONTRACT} FoldReport LayerNorm RMSNorm gate_at lr_at get_linear_kernel set_linear_kernel".split()


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_reached(name):
    value = getattr(tapernorm, name)
    assert value.__name__.rpartition(".")[2] == name


def test_dir_shows_the_public_names_alone_whatever_was_imported():
    import tapernorm.checkpoints.store

    assert set(dir(tapernorm)) == set(tapernorm.__all__) == set(NAMES)


def test_an_unknown_name_is_no_attribute():
    with pytest.raises(AttributeError, match="no attribute 'folding_'"):
        tapernorm.folding_  # noqa: B018


@pytest.mark.parametrize("statement", ["import tapernorm.export", "from tapernorm import export"])
def test_export_is_the_module_however_it_is_imported(statement):
    code = f"{statement}\nimport sys, tapernorm\nassert tapernorm.export is sys.modules['tapernorm.export']"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_import_and_dir_load_no_torch():
    code = "import sys, tapernorm; dir(tapernorm); tapernorm.UserError; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
