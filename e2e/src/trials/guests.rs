//! Programs that are not ours, of every kind there is, in a container with a share: the interceptor
//! is in those that it can be in, and all of them run as they do alone.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::{Value, json};

use super::bench::{Bench, from_template};
use crate::harness::TrialOutcome;
use crate::runner::Outcome;

const GRANTED: u64 = 1 << 30;

/// Whoever it is, not root.
const USER: u64 = 65532;

/// Runs every program and says how it ended, a line of JSON each.
///
/// A loader that does as the environment says complains of /nowhere: in a setuid program it must
/// not.
const RUN_ALL: &str = r#"
text() {
  local text=${1//\"/\\\"}
  printf '"%s"' "${text//$'\n'/\\n}"
}
run() { # name, command...
  local out status
  out=$("${@:2}" 2>/tmp/said)
  status=$?
  printf '{"name": "%s", "status": %d, "out": %s, "said": %s}\n' "$1" "$status" "$(text "$out")" "$(text "$(</tmp/said)")"
}
nowhere() { LD_PRELOAD=/nowhere LD_LIBRARY_PATH=/nowhere "$@"; }
run bash bash -c true
for kind in glibc static musl i386 setuid; do run "$kind" "/guests/$kind"; done
run told nowhere /guests/glibc
run told-setuid nowhere /guests/setuid
run probe tessera-probe fill
run probe-setuid nowhere /guests/setuid-probe fill
"#;

/// How a program ended, and what it said on its two outputs.
#[derive(Debug, Deserialize)]
struct End {
    name: String,
    status: i32,
    out: String,
    said: String,
}

pub(super) async fn unharmed(bench: Bench) -> TrialOutcome {
    bench.template("share", "a100.gpu.tessera.dev", json!({"memory": "1Gi", "cores": "1"})).await?;
    let mut pod = from_template("guests", "share");
    let container = &mut pod["spec"]["containers"][0];
    container["image"] = "tessera/guests:e2e".into();
    container["command"] = json!(["bash", "-c", RUN_ALL]);
    container["securityContext"] = json!({"runAsUser": USER});
    bench.create(pod).await?;
    let lines = bench.output_of("guests").await?;
    let end =
        |line: &String| Ok(serde_json::from_str(line).map(|end: End| (end.name.clone(), end))?);
    let ends: BTreeMap<String, End> = lines.iter().map(end).collect::<anyhow::Result<_>>()?;
    for name in ["bash", "glibc", "static", "musl", "i386", "setuid", "told", "told-setuid"] {
        as_alone(find(&ends, name)?)?;
    }
    for name in ["probe", "probe-setuid"] {
        held(find(&ends, name)?)?;
    }
    bench.delete(&["guests".to_owned()]).await?;
    Ok(Outcome::Held(vec![]))
}

fn find<'a>(ends: &'a BTreeMap<String, End>, name: &str) -> anyhow::Result<&'a End> {
    ends.get(name).ok_or_else(|| anyhow::anyhow!("nothing was said of {name}: {ends:?}"))
}

/// It ended well and said what it says; loaders said what they have to.
fn as_alone(end: &End) -> anyhow::Result<()> {
    let (user, with) = match end.name.as_str() {
        "bash" => return ensure(end, "", ""),
        "glibc" | "told" => (USER, "with the interceptor"),
        "setuid" | "told-setuid" => (0, "with the interceptor"),
        _ => (USER, "alone"),
    };
    let said = match end.name.as_str() {
        "i386" => {
            "from /etc/ld.so.preload cannot be preloaded (wrong ELF class: ELFCLASS64): ignored."
        }
        "told" => {
            "'/nowhere' from LD_PRELOAD cannot be preloaded (cannot open shared object file): ignored."
        }
        _ => "",
    };
    ensure(end, &format!("user {user}, {with}"), said)
}

fn ensure(end: &End, out: &str, said: &str) -> anyhow::Result<()> {
    let one_line = end.said.lines().count() == usize::from(!said.is_empty());
    anyhow::ensure!(
        end.status == 0 && end.out == out && one_line && end.said.ends_with(said),
        "expected `{out}`, `{said}`: {end:?}"
    );
    Ok(())
}

/// It got the share's memory, to the byte.
fn held(end: &End) -> anyhow::Result<()> {
    let lines =
        end.out.lines().map(serde_json::from_str::<Value>).collect::<Result<Vec<_>, _>>()?;
    let filled = lines.iter().find(|line| line["event"] == "filled");
    let filled = filled.ok_or_else(|| anyhow::anyhow!("it took nothing: {end:?}"))?;
    let limited = filled["takenBytes"] == GRANTED && filled["nvmlTotalBytes"] == GRANTED;
    anyhow::ensure!(end.status == 0 && end.said.is_empty() && limited, "of {GRANTED}: {end:?}");
    Ok(())
}
