//! PyTorch, where `python3` has it.

use std::process::Command;

use serde_json::Value;

use crate::container::{self, Container};
use crate::rows::{Rig, judged, number};

/// What is found of it.
pub(crate) const ROWS: [(&str, &str); 2] = [
    ("PyTorch: allocated until refused", "no more than the cap"),
    ("PyTorch: products of matrices of 4096", "99 % at least"),
];

/// What a program without PyTorch answers.
const ABSENT: &str = "no PyTorch for `python3` with CUDA here";

const PROGRAM: &str = include_str!("torch.py");

/// Both rows.
pub(crate) fn find(rig: &Rig<'_>) -> Vec<String> {
    let test = "import torch, sys; sys.exit(not torch.cuda.is_available())";
    // Without the node's containers: what is asked is whether the machine has it.
    let has_it =
        Command::new("python3").args(["-c", test]).output().is_ok_and(|output| output.status.success());
    if has_it { measure(rig) } else { ROWS.map(|_| ABSENT.to_owned()).into() }
}

fn run(container: &Container<'_>, what: &str) -> Value {
    container::lines_of(&container.run("python3", &["-c", PROGRAM, what])).pop().expect("a line")
}

fn measure(rig: &Rig<'_>) -> Vec<String> {
    let cap = rig.quarter();
    let share = rig.share("torch", cap, 100);
    let said = run(&rig.node.contain(&[&share]), "fill");
    let (reserved, seen) = (number(&said, "reserved"), number(&said, "total"));
    let percent = reserved / cap as f64 * 100.0;
    let [[none, with]] = rig.in_turn(["products"], |container| run(container, "products"));
    vec![
        judged(
            &format!("{percent:.1} % of the cap, which it sees as {seen:.0} bytes"),
            reserved <= cap as f64 && seen == cap as f64,
        ),
        judged(
            &format!("{none:.0} in 3 s, with the library {with:.0} ({:.1} %)", with / none * 100.0),
            with >= 0.99 * none,
        ),
    ]
}
