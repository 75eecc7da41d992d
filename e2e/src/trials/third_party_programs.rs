//! Trial of third-party programs in a container with a share. The interceptor is loaded where the
//! program supports it, and every program works as without it.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Value, json};

use super::test_bed::{A100, TestBed, from_template};
use crate::harness::TrialOutcome;
use crate::runner::Outcome;

const GRANTED: u64 = 1 << 30;

/// Any user other than root.
const USER: u64 = 65532;

/// Runs every program and prints its result as a line of JSON.
///
/// A dynamic loader that honours the environment reports a missing /nowhere; the loader of a setuid
/// program must ignore it.
const RUN_ALL: &str = r#"
text() {
  local text=${1//\"/\\\"}
  printf '"%s"' "${text//$'\n'/\\n}"
}
run() { # name, command...
  local out status
  out=$("${@:2}" 2>/tmp/stderr)
  status=$?
  printf '{"name": "%s", "status": %d, "out": %s, "stderr": %s}\n' "$1" "$status" "$(text "$out")" "$(text "$(</tmp/stderr)")"
}
nowhere() { LD_PRELOAD=/nowhere LD_LIBRARY_PATH=/nowhere "$@"; }
run bash bash -c true
for kind in glibc static musl i386 setuid; do run "$kind" "/executables/$kind"; done
run preload-missing nowhere /executables/glibc
run preload-missing-setuid nowhere /executables/setuid
run probe tessera-probe fill
run probe-setuid nowhere /executables/setuid-probe fill
"#;

/// Result of a program: exit status and output.
#[derive(Debug, Deserialize)]
struct ProgramResult {
    name: String,
    status: i32,
    out: String,
    stderr: String,
}

pub(super) async fn check_programs(test_bed: TestBed) -> TrialOutcome {
    test_bed.create_template("share", A100, json!({"memory": "1Gi", "cores": "1"})).await?;
    let mut pod = from_template("executables", "share");
    let container = &mut pod["spec"]["containers"][0];
    container["image"] = "tessera/executables:e2e".into();
    container["command"] = json!(["bash", "-c", RUN_ALL]);
    container["securityContext"] = json!({"runAsUser": USER});
    test_bed.create(pod).await?;
    let lines = test_bed.output_of("executables").await?;
    let end = |line: &String| {
        Ok(serde_json::from_str(line).map(|end: ProgramResult| (end.name.clone(), end))?)
    };
    let ends: BTreeMap<String, ProgramResult> =
        lines.iter().map(end).collect::<anyhow::Result<_>>()?;
    for name in [
        "bash",
        "glibc",
        "static",
        "musl",
        "i386",
        "setuid",
        "preload-missing",
        "preload-missing-setuid",
    ] {
        check_output(find(&ends, name)?)?;
    }
    for name in ["probe", "probe-setuid"] {
        check_limit(find(&ends, name)?)?;
    }
    test_bed.delete(&["executables"]).await?;
    Ok(Outcome::Passed(vec![]))
}

fn find<'a>(
    ends: &'a BTreeMap<String, ProgramResult>,
    name: &str,
) -> anyhow::Result<&'a ProgramResult> {
    ends.get(name).ok_or_else(|| anyhow::anyhow!("no result of {name}: {ends:?}"))
}

/// Checks the exit status and the output of a program, including its loader's messages.
fn check_output(end: &ProgramResult) -> anyhow::Result<()> {
    let (user, with) = match end.name.as_str() {
        "bash" => return ensure(end, "", ""),
        "glibc" | "preload-missing" => (USER, "with the interceptor"),
        "setuid" | "preload-missing-setuid" => (0, "with the interceptor"),
        _ => (USER, "alone"),
    };
    let stderr = match end.name.as_str() {
        "i386" => {
            "from /etc/ld.so.preload cannot be preloaded (wrong ELF class: ELFCLASS64): ignored."
        }
        "preload-missing" => {
            "'/nowhere' from LD_PRELOAD cannot be preloaded (cannot open shared object file): ignored."
        }
        _ => "",
    };
    ensure(end, &format!("user {user}, {with}"), stderr)
}

fn ensure(end: &ProgramResult, out: &str, stderr: &str) -> anyhow::Result<()> {
    let one_line = end.stderr.lines().count() == usize::from(!stderr.is_empty());
    anyhow::ensure!(
        end.status == 0 && end.out == out && one_line && end.stderr.ends_with(stderr),
        "expected `{out}`, `{stderr}`: {end:?}"
    );
    Ok(())
}

/// Checks that the program allocated exactly the share's memory.
fn check_limit(end: &ProgramResult) -> anyhow::Result<()> {
    let lines =
        end.out.lines().map(serde_json::from_str::<Value>).collect::<Result<Vec<_>, _>>()?;
    let filled = lines.iter().find(|line| line["event"] == "filled");
    let filled = filled.ok_or_else(|| anyhow::anyhow!("no memory was allocated: {end:?}"))?;
    let limited = filled["takenBytes"] == GRANTED && filled["nvmlTotalBytes"] == GRANTED;
    anyhow::ensure!(
        end.status == 0 && end.stderr.is_empty() && limited,
        "expected {GRANTED} bytes: {end:?}"
    );
    Ok(())
}
