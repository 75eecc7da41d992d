//! Programs run with the library as without it.

mod container;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use container::{Container, GIB, Node, compiler, inspect, program, set_up};
use tessera_test_support::{report_skip, test_name};

/// Returns exit code, output and errors.
fn end_of(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

fn both(node: &Node, with: &Container<'_>, program: &Path) -> [(Option<i32>, String, String); 2] {
    [with, &node.container_without_library()].map(|container| end_of(&container.run(program, &[])))
}

#[test]
fn program_with_own_allocator_exits_as_container_without_library() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let program = program("allocator", false, node.path());
    let share = node.share("claim-0", 0, GIB);
    let [with, without] = both(&node, &node.container(&[&share]), &program);
    assert_eq!(with, without);
    assert_eq!(with.0, Some(7));
    assert!(share.ledger(|ledger| ledger.peak_bytes()) > 0, "the library was in it");
}

/// Compiles `tests/programs/loaded.c`, which reports whether the library is loaded. Returns `None`
/// without such a compiler.
fn loaded(compiler: impl AsRef<OsStr>, options: &[&str], directory: &Path) -> Option<PathBuf> {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/loaded.c");
    let program = directory.join("loaded");
    let mut command = Command::new(compiler);
    command.arg("-o").arg(&program).arg(source).args(options);
    command.output().is_ok_and(|made| made.status.success()).then_some(program)
}

/// Compiles it for another kind of program, or reports a skip.
fn other_kind(
    test: &str,
    compiler: &str,
    options: &[&str],
    package: &str,
    node: &Node,
) -> Option<PathBuf> {
    let program = loaded(compiler, options, node.path());
    if program.is_none() {
        let command = [&[compiler], options].concat().join(" ");
        report_skip(test, format!("`{command}` makes no program; Debian: {package}"));
    }
    program
}

/// Returns the result of the program in a container with a share.
fn with_a_share(node: &Node, program: &Path) -> (Option<i32>, String, String) {
    end_of(&node.container(&[&node.share("claim-0", 0, GIB)]).run(program, &[]))
}

fn alone() -> (Option<i32>, String, String) {
    (Some(0), "user 0, alone\n".to_owned(), String::new())
}

#[test]
fn library_is_loaded_into_dynamic_program() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let program = loaded(compiler(), &[], node.path()).expect("a C compiler");
    let with = (Some(0), "user 0, with the interceptor\n".to_owned(), String::new());
    assert_eq!(with_a_share(&node, &program), with);
    assert_eq!(end_of(&node.container_without_library().run(&program, &[])), alone());
}

#[test]
fn static_program_runs() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let program = loaded(compiler(), &["-static"], node.path())
        .expect("a C compiler, and a static C library");
    assert_eq!(with_a_share(&node, &program), alone());
}

/// Its loader does not read `/etc/ld.so.preload`.
#[test]
fn musl_program_runs() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let Some(program) = other_kind(test_name!(), "musl-gcc", &[], "musl-tools", &node) else {
        return;
    };
    let needs = inspect("readelf", &["--program-headers"], &program);
    assert!(needs.contains("/lib/ld-musl-"), "dynamic: {needs}");
    assert_eq!(with_a_share(&node, &program), alone());
}

/// Its loader reports that it does not load the library.
#[test]
fn program_of_32_bits_runs() {
    let Some(node) = set_up(test_name!(), Node::new) else { return };
    let file = |name: &str| {
        let found = Command::new("cc").args(["-m32", &format!("-print-file-name={name}")]).output();
        String::from_utf8(found.expect("a C compiler").stdout).expect("text").trim().to_owned()
    };
    // Without the compiler's own library, which is in another package.
    let [start, prologue, epilogue] = ["crt1.o", "crti.o", "crtn.o"].map(file);
    let options = ["-m32", "-nostdlib", &start, &prologue, "-lc", &epilogue];
    let Some(program) = other_kind(test_name!(), "cc", &options, "libc6-dev-i386", &node) else {
        return;
    };
    let (code, out, said) = with_a_share(&node, &program);
    assert_eq!((code, out), (alone().0, alone().1));
    let message =
        "from /etc/ld.so.preload cannot be preloaded (wrong ELF class: ELFCLASS64): ignored.\n";
    assert!(said.ends_with(message) && said.lines().count() == 1, "{said}");
}
