//! Every way to reach the driver in each injection mode, and whether it is limited. The result is
//! `docs/reference/intercept-bypasses.md`.

mod container;

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use container::{Container, GIB, Mode, Node, libraries, lines_of, program, set_up};
use serde_json::Value;
use tessera_test_support::test_name;

const DOCUMENT: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/intercept-bypasses.md");

const HEAD: &str = "# Ways to the driver, and which of them the interceptor holds

Written by the test `bypasses` of `intercept/hook` from what its programs get; `UPDATE=1` writes it anew. In a container with a grant of
1 GiB each asks for 2 GiB, on the fake driver. *Held*: it is refused. **Escapes**: it gets them, uncounted. Without the interceptor
each of them is open.

By the driver's `--intercept`. `preload`: the library is loaded into every program of the container. `proxy`: it stands in the place of `libcuda.so.1` and
`libnvidia-ml.so.1`. `both`: it does both, and charges once (`docs/adr/0082-injection-modes.md`).

| way | preload | proxy | both |
|---|---|---|---|
";

const TAIL: &str = "
Not run here, by how they work:

- **ioctls on `/dev/nvidia*`**, made by a program without the driver's library: escape in every mode. So does a program with a loader of its
  own that maps the real driver.
- **Statically linked programs**: the preload library is not loaded into them. One that opens libcuda all the same, which glibc supports only in part (with the
  fake driver it crashes), escapes in mode `preload`, and finds the proxy in the others.
- **Programs of another C library** (musl): musl's loader does not read `/etc/ld.so.preload`, and cannot load NVIDIA's libraries, which are made
  for glibc. With a glibc beside it, such a program is one of the above.
- **Programs of 32 bits**: the library is of 64 bits, and the loader leaves it out with a message on stderr, once for each program (`ERROR: ld.so:
  object '/usr/local/lib/tessera/libtessera_intercept.so' from /etc/ld.so.preload cannot be preloaded (wrong ELF class: ELFCLASS64): ignored.`); the
  program runs, and ends as it does alone. Not in mode `proxy`. NVIDIA's driver of 32 bits is not among what a container gets; one in the image escapes.
- **Setuid programs**: the loader preloads what `/etc/ld.so.preload` names into them too, and leaves out what the environment names. The library
  reads no environment, but for the variables of MPS where a grant is by MPS (ADR 90). They are held.
- **`cuGetExportTable` and `nvmlInternalGetExportTable`** hand out tables of functions that are documented nowhere. They pass: NVIDIA's own libraries need
  them. A program that knows them escapes in every mode.

The trials `executables` and `intercept-modes` of `make e2e` run such programs, and the table's, in pods of a Kubernetes cluster.

So no mode is a boundary for a tenant who sets out to break it; what escapes shows in the audit (`docs/operator/security-model.md`). `both` leaves the fewest ways.
";

/// Returns the result of each way in a container.
fn outcomes(container: &Container<'_>, mode: Mode, node: &Node, ways: &Ways) -> Vec<(String, i64)> {
    let (elsewhere, real) = (libraries().join("libcuda.so.1"), mode.real_cuda());
    let [elsewhere, real] = [&elsewhere, &real].map(|path| path.to_str().expect("text"));
    let plugin = ways.plugin.to_str().expect("text");
    let arguments = [elsewhere, real, plugin];
    let mut found: Vec<(String, i64)> = Vec::new();
    for linked in [true, false] {
        for line in container.run_c("bypasses", linked, &arguments) {
            let route = line["route"].as_str().expect("a route").to_owned();
            if !found.iter().any(|(known, _)| *known == route) {
                found.push((route, line["result"].as_i64().expect("a number")));
            }
        }
    }
    let result = |lines: Vec<Value>| lines[0]["result"].as_i64().expect("a number");
    let world = format!("TESSERA_FAKE_WORLD={}", node.path().join("world.yaml").display());
    let usual = mode.cuda();
    let emptied = [usual.to_str().expect("text"), &world];
    found.push((
        "a program with an emptied environment".into(),
        result(lines_of(&container.run(&ways.elsewhere, &emptied))),
    ));
    found.push((
        "another copy of the driver, as of CUDA's compatibility package, by its path and `dlsym`"
            .into(),
        result(lines_of(&container.run(&ways.elsewhere, &[elsewhere]))),
    ));
    found
}

/// Programs that are compiled once.
struct Ways {
    plugin: PathBuf,
    elsewhere: PathBuf,
}

impl Ways {
    fn build(directory: &Path) -> Self {
        let compiled = |name: &str, options: &[&str], libraries: &[&Path]| {
            let source = Path::new(env!("CARGO_MANIFEST_DIR"))
                .join("tests/programs")
                .join(name)
                .with_extension("c");
            let out = directory.join(format!("{name}{}", options.concat()));
            let mut command = Command::new(container::compiler());
            command
                .args(["-std=gnu11", "-O1", "-o"])
                .arg(&out)
                .arg(source)
                .args(options)
                .args(libraries);
            let made = command.output().expect("a C compiler runs");
            assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
            out
        };
        let cuda = libraries().join("libcuda.so.1");
        Self {
            plugin: compiled("linkedplugin", &["-shared", "-fPIC"], &[&cuda]),
            elsewhere: program("elsewhere", false, directory),
        }
    }
}

fn cell(outcome: i64) -> &'static str {
    /// `CUDA_ERROR_OUT_OF_MEMORY`.
    const REFUSED: i64 = 2;
    match outcome {
        REFUSED => "held",
        0 => "**escapes**",
        _ => "not there",
    }
}

#[test]
fn list_of_bypasses_is_up_to_date() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let ways = Ways::build(node.path());
    let in_mode = |mode| {
        let share = node.share(&format!("{mode:?}"), 0, GIB);
        outcomes(&node.container_in(mode, &[&share]), mode, &node, &ways)
    };
    let open = in_mode(Mode::Bare);
    assert!(open.iter().all(|(_, outcome)| *outcome == 0), "each is a way: {open:?}");
    let held = Mode::INTERCEPTED.map(in_mode);
    let mut text = HEAD.to_owned();
    for (at, (way, _)) in open.iter().enumerate() {
        let [preload, proxy, both] = held.each_ref().map(|outcomes| cell(outcomes[at].1));
        writeln!(text, "| {way} | {preload} | {proxy} | {both} |").expect("a string");
    }
    text.push_str(TAIL);
    if std::env::var_os("UPDATE").is_some() {
        fs::write(DOCUMENT, &text).expect("written");
    }
    let written = fs::read_to_string(DOCUMENT).unwrap_or_default();
    assert!(written == text, "{DOCUMENT} is out of date; if that is meant: UPDATE=1\n{text}");
}
