//! Programs that it is a guest in run as they do without it.

mod container;

use std::path::Path;
use std::process::{Command, Output};

use container::{Container, GIB, Node, can_contain, program};

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
    if !can_contain("a_program_with_its_own_allocator_that_works_until_it_is_gone_ends_as_it_does_alone") {
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

#[test]
fn a_static_program_runs() {
    if !can_contain("a_static_program_runs") {
        return;
    }
    let node = Node::new();
    let program = node.path().join("static");
    let source = "#include <stdio.h>\nint main(void) { return puts(\"alone\") < 0; }\n";
    std::fs::write(program.with_extension("c"), source).expect("written");
    let mut compiler = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()));
    compiler.arg("-static").arg("-o").arg(&program).arg(program.with_extension("c"));
    assert!(compiler.status().expect("a C compiler runs").success());
    let [with, without] = both(&node, &node.contain(&[&node.share("claim-0", 0, GIB)]), &program);
    assert_eq!(with, without);
    assert_eq!(with, (Some(0), "alone\n".to_owned(), String::new()));
}
