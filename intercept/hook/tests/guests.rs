//! Programs that it is a guest in run as they do without it.

mod container;

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use container::{Container, GIB, Node, can_contain, compiler, inspect, program};
use tessera_test_support::report_skip;

/// How a program ended, and what it said.
fn end_of(output: &Output) -> (Option<i32>, String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (output.status.code(), text(&output.stdout), text(&output.stderr))
}

fn both(node: &Node, with: &Container<'_>, program: &Path) -> [(Option<i32>, String, String); 2] {
    [with, &node.without_the_library()].map(|container| end_of(&container.run(program, &[])))
}

#[test]
fn a_program_with_its_own_allocator_that_works_until_it_is_gone_ends_as_it_does_alone() {
    if !can_contain(
        "a_program_with_its_own_allocator_that_works_until_it_is_gone_ends_as_it_does_alone",
    ) {
        return;
    }
    let node = Node::new();
    let guest = program("guest", false, node.path());
    let share = node.share("claim-0", 0, GIB);
    let [with, without] = both(&node, &node.contain(&[&share]), &guest);
    assert_eq!(with, without);
    assert_eq!(with.0, Some(7));
    assert!(share.ledger(|ledger| ledger.peak_bytes()) > 0, "the library was in it");
}

/// Compiles `tests/programs/loaded.c`, which says whether the library is in it. Nothing where there
/// is no such compiler.
fn loaded(compiler: impl AsRef<OsStr>, options: &[&str], directory: &Path) -> Option<PathBuf> {
    let source = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/loaded.c");
    let program = directory.join("loaded");
    let mut command = Command::new(compiler);
    command.arg("-o").arg(&program).arg(source).args(options);
    command.output().is_ok_and(|made| made.status.success()).then_some(program)
}

/// The same of another kind than the usual; says so where it cannot be made.
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

/// What is said in a container with a share.
fn with_a_share(node: &Node, program: &Path) -> (Option<i32>, String, String) {
    end_of(&node.contain(&[&node.share("claim-0", 0, GIB)]).run(program, &[]))
}

fn alone() -> (Option<i32>, String, String) {
    (Some(0), "user 0, alone\n".to_owned(), String::new())
}

#[test]
fn a_dynamic_program_has_the_library_in_it_and_runs() {
    if !can_contain("a_dynamic_program_has_the_library_in_it_and_runs") {
        return;
    }
    let node = Node::new();
    let program = loaded(compiler(), &[], node.path()).expect("a C compiler");
    let with = (Some(0), "user 0, with the interceptor\n".to_owned(), String::new());
    assert_eq!(with_a_share(&node, &program), with);
    assert_eq!(end_of(&node.without_the_library().run(&program, &[])), alone());
}

#[test]
fn a_static_program_runs() {
    if !can_contain("a_static_program_runs") {
        return;
    }
    let node = Node::new();
    let program = loaded(compiler(), &["-static"], node.path())
        .expect("a C compiler, and a static C library");
    assert_eq!(with_a_share(&node, &program), alone());
}

/// Its loader does not read `/etc/ld.so.preload`.
#[test]
fn a_program_of_musl_runs() {
    const NAME: &str = "a_program_of_musl_runs";
    if !can_contain(NAME) {
        return;
    }
    let node = Node::new();
    let Some(program) = other_kind(NAME, "musl-gcc", &[], "musl-tools", &node) else { return };
    let needs = inspect("readelf", &["--program-headers"], &program);
    assert!(needs.contains("/lib/ld-musl-"), "dynamic: {needs}");
    assert_eq!(with_a_share(&node, &program), alone());
}

/// Its loader says that it leaves the library out.
#[test]
fn a_program_of_32_bits_runs() {
    const NAME: &str = "a_program_of_32_bits_runs";
    if !can_contain(NAME) {
        return;
    }
    let file = |name: &str| {
        let found = Command::new("cc").args(["-m32", &format!("-print-file-name={name}")]).output();
        String::from_utf8(found.expect("a C compiler").stdout).expect("text").trim().to_owned()
    };
    // Without the compiler's own library, which is in another package.
    let [start, prologue, epilogue] = ["crt1.o", "crti.o", "crtn.o"].map(file);
    let options = ["-m32", "-nostdlib", &start, &prologue, "-lc", &epilogue];
    let node = Node::new();
    let Some(program) = other_kind(NAME, "cc", &options, "libc6-dev-i386", &node) else { return };
    let (code, out, said) = with_a_share(&node, &program);
    assert_eq!((code, out), (alone().0, alone().1));
    let message =
        "from /etc/ld.so.preload cannot be preloaded (wrong ELF class: ELFCLASS64): ignored.\n";
    assert!(said.ends_with(message) && said.lines().count() == 1, "{said}");
}
