"""Launch scripts are read, line by line, and never run."""

from __future__ import annotations

import contextlib
import os
import pathlib
import time

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from paxcli.convert.maxtext.launch import Launch
from paxcli.convert.maxtext.shell import read_script
from paxcli.convert.maxtext.source import read_file, read_source
from paxcli.errors import ConfigError

SCRIPTS = pathlib.Path(__file__).parent / "scripts"


def launch_of(name: str, **arguments: str) -> Launch:
    (launch,) = read_file(SCRIPTS / name, arguments).launches
    return launch


def keys(launch: Launch) -> dict[str, str]:
    return {pair.key: pair.value for pair in launch.pairs}


def test_the_first_scripts() -> None:
    launch = launch_of("2xv4-128.scale.sh")
    assert keys(launch) == {
        "run_name": "2xv4-64",
        "dcn_data_parallelism": "2",
        "ici_fsdp_parallelism": "64",
        "steps": "10",
        "per_device_batch_size": "16",
        "enable_profiler": "true",
        "remat_policy": "full",
        "scale": "3",
    }
    assert launch.flags["LIBTPU_INIT_ARGS"].split()[-1] == "TPU_MEGACORE=MEGACORE_DENSE"
    assert launch.note == "158 TFLOP/s, 22B parameters" and {pair.line for pair in launch.pairs} == {4}


def test_a_comment_at_the_end_of_the_command_is_its_note() -> None:
    launch = launch_of("1xv4-384.sh")
    assert launch.note == "154 TFLOP/s, 52B" and keys(launch)["run_name"] == "v4-384_52b"


def test_arguments_win_over_exports() -> None:
    assert keys(launch_of("22b.sh"))["base_output_directory"] == "gs://a-bucket"
    launch = launch_of("22b.sh", RUN_NAME="mine", OUTPUT_PATH="gs://mine")
    assert keys(launch)["base_output_directory"] == "gs://mine"
    assert [(pair.key, pair.value) for pair in launch.overrides] == [("RUN_NAME", "mine")]
    assert launch_of("22b.sh").overrides == []
    assert {pair.line for pair in launch.pairs} == {23, 24, 25}


def test_a_backslash_at_the_end_ends_the_command() -> None:
    launch = launch_of("128b.sh")
    assert keys(launch)["fused_mlp"] == "true" and keys(launch)["remat_policy"] == "qkv_proj_offloaded"
    (path,) = [pair for pair in launch.pairs if pair.key == "base_output_directory"]
    assert path.missing == {"OUTPUT_PATH"}


def test_a_script_that_calls_a_script_with_positions() -> None:
    got = keys(launch_of("v5p_2048.sh"))
    assert [got[f"ici_{axis}_parallelism"] for axis in ("data", "fsdp", "tensor")] == ["8", "16", "8"]
    assert got["remat_policy"] == "save_dot_except_mlpwi" and got["run_name"] == "wide"
    assert keys(launch_of("gpt3_175b_base.sh"))["run_name"] == "gpt3-DATE"
    assert keys(launch_of("gpt3_175b_base.sh", **{"1": "x", "2": "8"}))["per_device_batch_size"] == "8"


def test_flags_over_several_lines_and_a_config_beside() -> None:
    launch = launch_of("16vm.sh")
    assert "--xla_gpu_enable_command_buffer='' --xla_gpu_all_reduce" in launch.flags["XLA_FLAGS"]
    got = keys(launch)
    assert got["model_name"] == "llama2-7b" and got["mlp_activations"] == "[silu,linear]"
    assert got["run_name"] == "llama-2-16vm-DATE"


def test_a_malformed_pair_and_a_duplicate() -> None:
    launch = launch_of("128vm.sh")
    assert keys(launch)["enable_checkpointing"] == "False" and keys(launch)["run_name"] == "two"
    assert [(report.line, report.text) for report in launch.diagnostics] == [(2, "enable_checkpointing: False")]


def test_a_command_in_a_string() -> None:
    assert keys(launch_of("convergence.sh"))["dataset_type"] == "tfds"
    reading = read_file(SCRIPTS / "convergence.sh", {"2": "hf"})
    assert keys(reading.launches[0])["hf_path"] == "c4" and keys(reading.launches[0])["ici_fsdp_parallelism"] == "4"
    assert reading.others[0].text.endswith("eval_assert.py")


def test_arithmetic_trimming_and_what_is_passed_over() -> None:
    reading = read_file(SCRIPTS / "required.sh", {"BASE": "gs://b/"})
    got = keys(reading.launches[0])
    assert got["steps"] == "3005" and got["per_device_batch_size"] == "2"
    assert got["base_output_directory"] == "gs://b" and got["adamw_mask"] == '["token_embedder/embedding"]'
    assert [(s.line, s.reason) for s in reading.skipped] == [(4, "a `while` statement")]


def test_a_wrapper_carries_the_topology() -> None:
    launch = launch_of("xpk.sh")
    assert (launch.topology, launch.num_slices) == ("v5litepod-256", 2) and keys(launch)["steps"] == "5"


@pytest.mark.parametrize(
    "command",
    [
        "gcloud compute tpus tpu-vm ssh $TPU --worker=all --command='cd maxtext && python3 train.py base.yml steps=5'",
        "srun bash -c 'python3 train.py base.yml steps=5'",
        "docker run --rm -v $HOME:/data image:1 bash -lc 'python3 train.py base.yml steps=5'",
        "sudo docker run --rm --privileged image:1 python3 train.py base.yml steps=5",
        "kubectl exec -it pod -- sh -c 'python3 train.py base.yml steps=5'",
        "time xpk workload create --command 'python3 train.py base.yml steps=5'",
        "nohup ./train.sh steps=5 &",
    ],
)
def test_a_launch_through_another_program_is_found(command: str) -> None:
    called = "for key in $@; do export $key; done\npython3 train.py base.yml steps=$steps"
    reading = read_script(command, open_script={"./train.sh": called}.get)
    assert [keys(launch) for launch in reading.launches] == [{"steps": "5"}] and not reading.skipped


def test_a_launch_behind_an_unknown_prefix_is_found() -> None:
    script = 'if "$DRY_RUN"; then CMD=echo; else CMD=; fi\n$CMD python3 train.py base.yml steps=5'
    assert [keys(launch) for launch in read_script(script).launches] == [{"steps": "5"}]


@pytest.mark.parametrize(
    "command", ["kubectl get pods", "gcloud auth login", "docker pull image:1", "command -v python3"]
)
def test_another_program_without_a_launch_is_reported(command: str) -> None:
    reading = read_script(command)
    assert [report.text for report in reading.skipped] == [command] and not reading.launches


def test_an_argument_that_is_missing_in_a_string_is_named() -> None:
    (launch,) = read_script('bash -c "python3 train.py base.yml steps=$1"').launches
    assert [(pair.key, pair.missing) for pair in launch.pairs] == [("steps", {"1"})]


def test_a_text_cannot_grow_without_end() -> None:
    doubling = "A=xxxxxxxx\n" + "A=$A$A\n" * 60 + "python3 MaxText/train.py run_name=$A\n"
    nested = "A=" + "${B:-" * 400 + "}" * 400 + "\n" + "if true; then " * 3000
    assert len(read_script(doubling).launches[0].pairs[0].value) <= 1 << 16
    read_script(nested)  # would never end, if it took each level twice
    read_script("bash -c '" + "((((" * 5000)
    for opening in ("((((", "$((1+", "a && ", "[[ ", "[ -z x -a ", "{ ", "`", "case x in x) ", "! ", "! [ ! "):
        read_script(opening * 5000)
    read_script("echo $((" + "1+" * 5000 + "1)) [ " + "1 -a " * 5000 + "]")


def test_the_parser_gives_up_in_time() -> None:
    start = time.monotonic()
    with pytest.raises(ConfigError, match="too long to parse"):
        read_script("A=(" * 40_000)
    assert time.monotonic() - start < 10


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('ls\npython3 MaxText/train.py base.yml steps=1 "run_name=a', "Line 2: the training command"),
        ("echo\nbash -c 'python3 MaxText/train.py steps=${A'", "Line 2: the training command"),
    ],
)
def test_a_syntax_error_in_a_launch_is_an_error_with_its_line(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        read_script(text)
    assert raised.value.hint


def test_a_syntax_error_elsewhere_is_reported_with_its_line() -> None:
    found = read_script("echo )\npython3 MaxText/train.py base.yml steps=1\nif true; then\n  ls\n")
    assert [launch.line for launch in found.launches] == [2]
    assert [(skipped.line, skipped.reason) for skipped in found.skipped] == [
        (1, "not valid shell syntax"),
        (3, "not valid shell syntax"),
    ]


def test_words_beside_each_other() -> None:
    text = (
        "A=x\nB=$A-y-$A-z\n" + 'python3 MaxText/train.py run_name=$A-$B-$A-w hf_path="$A  $B" dataset_name=x\\ $1$2b\n'
    )
    assert keys(read_script(text, {"1": "1", "2": "2"}).launches[0]) == {
        "run_name": "x-x-y-x-z-x-w",
        "hf_path": "x  x-y-x-z",
        "dataset_name": "x 12b",
    }
    text = 'eval "python3 MaxText/train.py steps=1"--x y'
    assert keys(read_script(text).launches[0]) == {"steps": "1--x"}


def test_lists_groups_and_conditions() -> None:
    text = """
true && A=1 || A=2
false && B=1 || B=2
[ -n "$C" ] && [ $A -eq 1 ] || { D=4; }
if [ "$A" != 1 ]; then E=1; elif ! [ -z "$C" ]; then E=2; else E=3; fi
if ls; then F=1; fi
G=1 ls
echo ${H:=1} > log
(cd x && python3 MaxText/train.py a=$A b=$B d=$D e=$E f=$F g=$G h=$H > log 2>&1) | tee out
"""
    found = read_script(text)
    assert keys(found.launches[0]) == {"a": "1", "b": "2", "d": "4", "e": "3", "f": "${F}", "g": "", "h": "1"}
    assert [(skipped.line, skipped.reason) for skipped in found.skipped] == [
        (6, "its condition is unknown"),
        (7, "not a command that pax knows"),
    ]


CANARY = "pax-canary"
TOUCH = f"touch {CANARY}"
WORDS = st.sampled_from(
    [
        "python3",
        "MaxText/train.py",
        "-m",
        "MaxText.train",
        "base.yml",
        "steps=10",
        "a=$A",
        "b=${B:-x}",
        "${C:?no}",
        "$1",
    ]
    + [
        "$(date)",
        f"$({TOUCH})",
        f"`{TOUCH}`",
        f"$(({TOUCH}))",
        f"${{A:-$({TOUCH})}}",
        "$@",
        '"$@"',
        "''",
        '"',
        "'",
        "\\",
    ]
    + [
        "A=1",
        "A+=2",
        "export",
        "M_STEPS=3",
        "eval",
        f'"{TOUCH}"',
        "bash",
        "-c",
        "xpk",
        f'--command="{TOUCH}"',
        "./x.sh",
    ]
    + ["if", "[", "-n", "]", ";", "then", "else", "elif", "fi", "for", "ARGUMENT", "in", "do", "done", "while", "case"]
    + ["esac", "{", "}", "(", ")", "f()", "&&", "||", "|", "&", "<<EOF", "EOF", "<<<", ">", "2>&1", "#", "\n", "\\\n"]
    + [
        "$((1+$A))",
        "$((9*9))",
        "$((1/0))",
        "${A%/}",
        "${A##*x}",
        "${#A}",
        "${A//x/y}",
        f"__import__('os').system('{TOUCH}')",
    ]
    + [f"$((__import__('os').system('{TOUCH}')))"]
)
FUZZ = settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("canary"))


@FUZZ
@given(st.lists(st.tuples(WORDS, st.sampled_from([" ", "", "\n", "  "])), max_size=60))
def test_no_script_of_the_grammar_breaks_it_or_runs(pieces: list[tuple[str, str]]) -> None:
    text = "".join(word + blank for word, blank in pieces)
    try:
        read_script("A=1\n" + text, {"A": "7", "1": "one"}, lambda _: f"{TOUCH}\n$1")
    except ConfigError as error:
        assert error.hint and "not valid shell syntax" in error.message
    assert not os.path.exists(CANARY)


@FUZZ
@given(st.binary(max_size=400))
@example(b"$!\x01${")
def test_no_bytes_break_it(content: bytes) -> None:
    path = pathlib.Path("x.sh")
    path.write_bytes(content)
    try:
        read_source([str(path)])
    except ConfigError as error:
        assert error.hint
    with contextlib.suppress(ConfigError):
        read_script(content.decode("latin-1"))
    assert os.listdir(".") == ["x.sh"]


@pytest.mark.parametrize("command", ["$CMD", 'eval "$CMD"', 'bash -c "$CMD"', 'xpk workload create --command "$CMD"'])
def test_an_unset_variable_leaves_only_its_word_unknown(command: str) -> None:
    script = 'CMD="python3 MaxText/train.py base.yml base_emb_dim=384 run_name=a-$NAME steps=$STEPS $MORE max=3"\n'
    (launch,) = read_script(script + command).launches
    missing = {pair.key: set(pair.missing) for pair in launch.pairs}
    assert missing == {"base_emb_dim": set(), "run_name": {"NAME"}, "steps": {"STEPS"}, "max": set()}
    assert keys(launch)["base_emb_dim"] == "384"


def test_arrays_and_cases_of_letters() -> None:
    script = (
        'ARGS=(steps=7 "run_name=a b")\nARGS+=(model_name=${M,,})\npython3 -m MaxText.train base.yml "${ARGS[@]}" x=1'
    )
    (launch,) = read_script(f"M=Llama2-7B\n{script}").launches
    assert keys(launch) == {"steps": "7", "run_name": "a b", "model_name": "llama2-7b", "x": "1"}


@pytest.mark.parametrize("how", ["bash", "bash -x", "sh -eu"])
def test_the_arguments_of_a_script_are_its_own(how: str) -> None:
    called = (
        'RUN=$1; shift\nB="$1"\nshift 1\npython3 -m MaxText.train base.yml "$@" run_name=$RUN per_device_batch_size=$B'
    )
    (launch,) = read_script(f"{how} run.sh mine 3 model_name=gpt3-52k steps=5", {}, {"run.sh": called}.get).launches
    assert keys(launch) == {
        "model_name": "gpt3-52k", "steps": "5", "run_name": "mine", "per_device_batch_size": "3",
    }  # fmt: skip
    (launch,) = read_script(
        "bash run.sh steps=5", {}, {"run.sh": "steps=7\npython3 -m MaxText.train steps=$steps"}.get
    ).launches
    assert keys(launch) == {"steps": "7"}
    (launch,) = read_script("set -eu -- 4 gpt3-52k\npython3 -m MaxText.train steps=$1 model_name=$2").launches
    assert keys(launch) == {"steps": "4", "model_name": "gpt3-52k"}


TRAIN = "python3 -m MaxText.train"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("[[ $M == llama* ]] && A=1 || A=2\nTRAIN a=$A", [{"a": "1"}]),
        ('[[ $M != llama* ]] && A=1\n[[ $M == "llama*" ]] && A=3\nTRAIN a=${A:-2}', [{"a": "2"}]),
        ('if [[ -z $N || $M == x ]] && [[ ! $N && $T == "a b" ]]; then A=1; fi\nTRAIN a=$A', [{"a": "1"}]),
        ("declare -x M_A=1\nset -a\nM_B=2\nset +a\nM_C=3\nTRAIN", [{"A": "1", "B": "2"}]),
        ("export M_A=1 M_B=2\nexport -n M_A\nunset M_B\nTRAIN a=${M_B:-3}", [{"a": "3"}]),
        ("export \"M_A=1 2\"\ndeclare 'B=$A'\nTRAIN b=${B:-3}", [{"A": "1 2", "b": "$A"}]),
        ("A=1\nexport $(cat .env)\nTRAIN a=$((A + 0x10)) b=$((010))", [{"a": "17", "b": "$((010))"}]),
        ("(A=1; TRAIN a=$A)\nTRAIN a=${A:-2}", [{"a": "1"}, {"a": "2"}]),
        ("A=1\nA=2 TRAIN a=$A\nTRAIN a=$A", [{"a": "1"}, {"a": "1"}]),
        ("yes | TRAIN a=1", [{"a": "1"}]),
        ("command TRAIN a=1", [{"a": "1"}]),
        ("eval A=1\nTRAIN a=$A", [{"a": "1"}]),
        ("source env.sh\nTRAIN a=$A", [{"a": "1"}]),
        ("[ -z $N ] && TRAIN a=1 && exit\nTRAIN a=2", [{"a": "1"}]),
        ("TRAIN a=1\n(exit)\nTRAIN a=2", [{"a": "1"}, {"a": "2"}]),
        ("[ -z $N ] && exit 1\nTRAIN a=1", [{"a": "1"}]),  # it is for those who call it without its arguments
        ("TRAIN b.yml > log.txt a=1 2>&1 b=2", [{"a": "1", "b": "2"}]),
        ("cd x && TRAIN a=1 2>&1 b=2 | tee log", [{"a": "1", "b": "2"}]),
        ("cd x\n! TRAIN a=1", [{"a": "1"}]),
        ("A=1\nA=2 B=3\nTRAIN a=$A b=$B", [{"a": "2", "b": "3"}]),
        ("A=1\nA=2 B=3 # sizes\n\nset -x\nTRAIN a=$A b=$B", [{"a": "2", "b": "3"}]),
        ("A=2 B=3\nexport M_C=4\nTRAIN a=$A b=$B", [{"C": "4", "a": "2", "b": "3"}]),
        ("A=1 B=2\nA=3 B=4 \\\n  TRAIN a=$A b=$B", [{"a": "1", "b": "2"}]),
        ('A=1\nB="$A "\nC="${A}  "\nTRAIN a="${B}2" b="$C$A" c="$((A + 1)) "', [{"a": "1 2", "b": "1  1", "c": "2 "}]),
    ],
)
def test_a_script_trains_as_in_a_shell(script: str, expected: list[dict[str, str]]) -> None:
    found = read_script(f"M=llama2-7b T='a b'\n{script}".replace("TRAIN", TRAIN), {}, {"env.sh": "X=1 date\nA=1"}.get)
    values = [{pair.key: pair.value for pair in (*launch.overrides, *launch.pairs)} for launch in found.launches]
    assert values == expected


def test_what_follows_an_exit_is_reported() -> None:
    found = read_script(f"{TRAIN} a=1\nexit 0\n{TRAIN} a=2\n{TRAIN} a=3")
    assert [(skipped.line, skipped.reason) for skipped in found.skipped] == [(3, "after an `exit`")]


@pytest.mark.parametrize("declared", ["$(cat .env | xargs)", "$NAME=5", '"${NAME}=5"', "A=1 $MORE"])
def test_a_declaration_of_unknown_variables_is_reported(declared: str) -> None:
    found = read_script(f"export {declared}\n{TRAIN} a=${{A:-3}}")
    assert [(skipped.line, skipped.reason) for skipped in found.skipped] == [
        (1, "the variables that it sets are unknown")
    ]


def test_the_output_of_a_command_is_one_unknown_value() -> None:
    (launch,) = read_script(f"A=$(nproc --all)\n{TRAIN} a=$A b=$(cat a b) c=1").launches
    assert [(pair.key, set(pair.missing)) for pair in launch.pairs] == [
        ("a", {"$(nproc --all)"}), ("b", {"$(cat a b)"}), ("c", set()),
    ]  # fmt: skip
    assert not launch.diagnostics


def test_an_argument_that_is_missing_after_shift_has_its_number() -> None:
    (launch,) = read_script("A=$1; shift\npython3 -m MaxText.train run_name=$A steps=$1").launches
    assert [set(pair.missing) for pair in launch.pairs] == [{"1"}, {"2"}]


@pytest.mark.parametrize(
    "statement",
    [
        "printf -v A %03d 7", "read -r A B <<< '16 32'", "let A=A+4", "((A += 5))", "((A++))", "mapfile -t A < file",
        "for X in 4 5; do A=$X; done", "while ((A < 5)); do ((A *= 2)); done", "case x in x) A=4;; *) A=5;; esac",
        "set_sizes() { A=5; }", "if [ -f file ]; then A=4; fi", "[ -f file ] || A=4", "grep -q x file && A=4",
        "set_sizes() { A=5; }\nA=1\nset_sizes",
        "if [ $X = 1 ]; then A=2; elif grep x file; then A=3; else A=4; fi", "A[0]=4", "getopts a: A -a 4",
    ],
)  # fmt: skip
def test_a_variable_that_a_skipped_statement_may_set_is_unknown(statement: str) -> None:
    """In bash, each of these changes `A`, or may: its former value would be a wrong one."""
    words = "steps=$A name=${A:-2} prompt=${A:+3} other=3"
    file = read_script(f"A=1\n{statement}\n{TRAIN} {words}\nA=4\n{TRAIN} steps=$A")
    first, second = file.launches
    assert [(pair.key, set(pair.missing)) for pair in first.pairs] == [
        ("steps", {"${A}"}), ("name", {"${A}"}), ("prompt", {"${A}"}), ("other", set()),
    ]  # fmt: skip
    assert file.skipped and keys(second) == {"steps": "4"} and not second.pairs[0].missing
    pinned = read_script(f"A=1\n{statement}\n{TRAIN} steps=$A", {"A": "9"})
    assert keys(pinned.launches[0]) == {"steps": "9"}


@pytest.mark.parametrize(
    "loop",
    [
        'while [[ $# -gt 0 ]]; do case $1 in --steps) A=$2;; esac; shift; done', 'for X in "$@"; do A=$X; done',
        'while getopts "a:" OPT; do case "$OPT" in a) A="$OPTARG";; esac; done', "until true; do A=2; done",
    ],
)  # fmt: skip
def test_a_loop_that_does_not_run_changes_nothing(loop: str) -> None:
    file = read_script(f"A=1\n{loop}\n{TRAIN} steps=$A")
    assert keys(file.launches[0]) == {"steps": "1"} and not file.skipped
    if "$" in loop:
        (launch,) = read_script(f"A=1\n{loop}\n{TRAIN} steps=$A", {"1": "x"}).launches
        assert launch.pairs[0].missing == {"${A}"}


@pytest.mark.parametrize(
    ("command", "value", "missing"),
    [
        (f"bash -c '{TRAIN} steps=$1' _ 12", "12", set()),
        (f"bash -c '{TRAIN} steps=${{A:-7}}'", "7", set()),
        (f"export A; bash -c '{TRAIN} steps=${{A:-7}}'", "1", set()),
        (f'bash -c "{TRAIN} steps=$A"', "1", set()),
        (f"bash -l -c '{TRAIN} steps=3'", "3", set()),
        (f"bash -euo pipefail -c '{TRAIN} steps=3'", "3", set()),
        (f"if {TRAIN} steps=3; then echo done; fi", "3", set()),
        (f"if ! {TRAIN} steps=3; then exit 1; fi", "3", set()),
        (f"B=2 C=$A\n! {TRAIN} steps=$B", "2", set()),
        (f"{TRAIN} steps={{1,2}}", "{1,2}", {"steps={1,2}"}),
        (f'{TRAIN} steps="{{1,2}}"', "{1,2}", set()),
    ],
)
def test_other_shells_conditions_and_braces(command: str, value: str, missing: set[str]) -> None:
    """The values that bash gives these commands. Braces make two words of one, so that the value is unknown."""
    (launch,) = read_script(f"A=1\n{command}", {"1": "5"}).launches
    assert [(pair.value, set(pair.missing)) for pair in launch.pairs] == [(value, missing)]
