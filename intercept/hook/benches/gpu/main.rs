//! Behaviour of the interceptor on a real GPU: `make bench-gpu` fills the table of
//! `docs/benchmarks/gpu.md`.
//!
//! It takes the first GPU that CUDA has here, which no other program should use meanwhile, and
//! containers like those of the tests, in user namespaces. Without a GPU it prints the reason, and
//! the rows that were not measured. Nothing is asserted: figures depend on the machine.

#[path = "../../tests/container/mod.rs"]
mod container;
mod rows;

use rows::{Effort, Gpu, Programs, Row};

const EFFORT: Effort = Effort { window_ms: 1_000, windows: 5, batch: 400, turns: 3 };

fn main() {
    match gpu() {
        Err(reason) => {
            println!("no GPU: {reason}\n");
            print(&rows::waiting());
        }
        Ok((node, gpu)) => {
            println!("{}, driver {}, CUDA {}\n", gpu.name, gpu.driver, gpu.cuda);
            print(&rows::find(&node, &gpu, EFFORT, &Programs::of_this_machine()));
        }
    }
}

fn gpu() -> Result<(container::Node, Gpu), String> {
    if let Some(reason) = container::namespaces_error() {
        return Err(format!("containers cannot be made here: {reason}"));
    }
    let node = container::Node::of_this_machine();
    let gpu = rows::look(&node)?;
    Ok((node, gpu))
}

fn print(rows: &[Row]) {
    println!("| | goal | found |\n|---|---|---|");
    for row in rows {
        println!("| {} | {} | {} |", row.what, row.goal, row.found);
    }
}
