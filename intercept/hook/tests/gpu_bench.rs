//! Checks on a fake node that `make bench-gpu` has a figure for each row, because a machine with a
//! GPU is rarely available.

mod container;
#[path = "../benches/gpu/rows/mod.rs"]
mod rows;

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use container::{Node, control_daemon, set_up};
use rows::{Effort, NO_GPU, Programs, Row, find, look, waiting};
use rows::{proxy, python, smi};
use tessera_test_support::{report_skip, test_name};

/// Minimum effort for figures.
const EFFORT: Effort = Effort { window_ms: 200, windows: 1, batch: 20, turns: 1 };

/// The table of the rows.
const DOCUMENT: &str = include_str!("../../../docs/benchmarks/gpu.md");

/// Output of `nvidia-smi` in its documented form.
const SAMPLES: &str = "2024/05/14 09:21:32.912, 0\n\
                       2024/05/14 09:21:33.012, 20\n\
                       2024/05/14 09:21:33.512, 26\n\
                       2024/05/14 09:21:34.013, 31\n\
                       2024/05/14 09:21:34.614, 33\n\
                       2024/05/14 09:21:35.015, 99\n\
                       2024/05/14 09:21:35.1";

/// Creates a fake `nvidia-smi`, which prints samples until it is killed, or memory.
fn sampler(directory: &Path) -> PathBuf {
    let (program, samples) = (directory.join("nvidia-smi"), directory.join("samples"));
    fs::write(&samples, SAMPLES).expect("written");
    let script = format!(
        "#!/bin/sh\ncase \"$*\" in\n*--loop-ms=100*) cat {}; exec tail -f /dev/null;;\n*) echo '20252, 0';;\nesac\n",
        samples.display()
    );
    fs::write(&program, script).expect("written");
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).expect("set");
    program
}

/// Returns true if the row needs a program that has no fake.
fn lacks_a_program(row: &Row) -> bool {
    ["no `python3` in PATH", "no `ncu` in PATH"].contains(&row.found.as_str())
}

#[test]
fn every_row_of_the_gpu_bench_has_a_figure() {
    let Some(node) = set_up(test_name!(), Node::in_real_time) else { return };
    let gpu = look(&node).expect("the fake one");
    assert!(gpu.name.contains("H100") && !gpu.driver.is_empty() && !gpu.cuda.is_empty());
    let programs = Programs {
        mps_control: Some(control_daemon().to_owned()),
        smi: Some(sampler(node.path())),
        ..Programs::default()
    };
    let found = find(&node, &gpu, EFFORT, &programs);
    let waiting = waiting();
    assert!(waiting.iter().all(|row| row.found == NO_GPU));
    assert!(
        found
            .iter()
            .zip(&waiting)
            .all(|(found, waits)| (&found.what, found.goal) == (&waits.what, waits.goal))
    );
    for row in &found {
        let has_figure =
            row.found.starts_with(|first: char| first.is_ascii_digit() || first == '-');
        assert!(has_figure || lacks_a_program(row), "{}: {}", row.what, row.found);
    }
    assert_eq!(
        found.iter().filter(|row| lacks_a_program(row)).count(),
        9,
        "PyTorch's, Triton's, NCCL's, ncu's"
    );
    // Rows whose result does not depend on the load of the machine.
    for what in [
        "filled to the cap, on",
        "filled to the cap with managed memory",
        "the same, as the program sees it",
        "what the ledger has",
        "as a proxy: filled to the cap",
        "as a proxy: the same",
        "as a proxy: `nvidia-smi`",
        "MPS: multiprocessors",
        "MPS: asked after a daemon",
    ] {
        let row = found.iter().find(|row| row.what.starts_with(what)).expect("a row");
        assert!(row.found.ends_with(": met"), "{}: {}", row.what, row.found);
    }
    let beyond = found.iter().find(|row| row.what.starts_with("1.2 times")).expect("a row");
    assert!(beyond.found.contains(", 0 of "), "no word is wrong: {}", beyond.found);
}

#[test]
fn machine_without_gpu_is_recognized() {
    let Some(node) = set_up(test_name!(), Node::of_this_machine) else { return };
    // A GPU of this machine is found.
    match look(&node) {
        Err(reason) => assert!(!reason.is_empty()),
        Ok(gpu) => assert!(!gpu.driver.is_empty()),
    }
}

#[test]
fn document_lists_rows_of_the_gpu_bench_in_order() {
    let rows = DOCUMENT.lines().filter(|line| line.starts_with("| "));
    let rows: Vec<_> = rows.filter(|line| !line.starts_with("| |")).collect();
    let wanted: Vec<_> =
        waiting().iter().map(|row| format!("| {} | {} |", row.what, row.goal)).collect();
    assert_eq!(rows.len(), wanted.len());
    for (row, wanted) in rows.iter().zip(&wanted) {
        assert!(row.starts_with(wanted), "{row} is to begin as {wanted}");
    }
}

#[test]
fn only_fully_sampled_seconds_count() {
    let means = smi::means_of_seconds(SAMPLES);
    assert_eq!(means, [23.0, 32.0]);
    assert!((smi::mean_absolute_error(&means, 25.0) - 4.5).abs() < 1e-9);
}

#[test]
fn samples_without_utilization_give_no_seconds() {
    for said in [
        "",
        "No devices were found\n",
        "2024/05/14 09:21:33.512, [N/A]\n",
        "2024/05/14 09:21:33.512, 3",
    ] {
        assert!(smi::means_of_seconds(said).is_empty(), "{said}");
    }
}

#[test]
fn parses_total_and_used_memory_of_nvidia_smi() {
    assert_eq!(smi::total_and_used("20389, 20388\n"), Some([20389.0, 20388.0]));
    assert_eq!(smi::total_and_used("[Insufficient Permissions], 1\n"), None);
}

#[test]
fn counts_profiled_kernels_in_the_output_of_ncu() {
    let profile = "==PROF== Connected to process 4242 (/tmp/gpu)\n\
                   ==PROF== Profiling \"spin_for_1us\" - 0: 0%....50%....100% - 1 pass\n\
                   {\"launched\":2}\n\
                   \"ID\",\"Process ID\",\"Kernel Name\",\"Metric Name\",\"Metric Value\"\n\
                   \"0\",\"4242\",\"spin_for_1us\",\"gpu__time_duration.sum\",\"3,456\"\n\
                   \"1\",\"4242\",\"spin_for_1us\",\"gpu__time_duration.sum\",\"3,424\"\n";
    assert_eq!(proxy::profiled(profile), 2);
    let refused = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters\n";
    assert_eq!(proxy::profiled(refused), 0);
}

#[test]
fn python_scripts_compile() {
    let Some(python) = Programs::of_this_machine().python else {
        report_skip(test_name!(), rows::absent("python3"));
        return;
    };
    let directory = tempfile::TempDir::new().expect("a directory");
    for script in [&python::TORCH, &python::TRITON, &python::NCCL] {
        for (name, text) in [(script.name, script.text), ("test.py", script.test)] {
            let path = directory.path().join(name);
            fs::write(&path, text).expect("written");
            let tried = Command::new(&python)
                .args(["-m", "py_compile"])
                .arg(&path)
                .output()
                .expect("it runs");
            assert!(tried.status.success(), "{name}: {}", String::from_utf8_lossy(&tried.stderr));
        }
    }
}
