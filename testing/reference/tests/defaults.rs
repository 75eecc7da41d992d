//! Holds the defaults of the chart to those of the programs: an operator who reads `--help` and one
//! who reads `values.yaml` expect the same.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::path::Path;

use clap::CommandFactory as _;

/// Flags whose default differs in the chart, with the reason.
const DIFFERENT: [(&str, &str); 6] = [
    ("log-format", "a cluster's log collector reads JSON, a person at a terminal reads text"),
    ("webhook-address", "the webhook needs objects of the cluster, which the chart makes"),
    ("driver-root", "the host's directory is mounted there"),
    ("driver-root-host", "the default of the flag is the value of --driver-root"),
    ("sysfs-root", "the host's sysfs is mounted there"),
    ("device-directory", "only the container's own /dev may get device nodes"),
];

/// Returns the arguments `--flag=value` of the containers that run `program` in the chart as
/// rendered with its defaults.
fn chart_arguments(program: &str) -> BTreeMap<String, String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/chart/golden/default.yaml");
    let text = std::fs::read_to_string(path).unwrap();
    let document = text
        .split("\n---")
        .find(|document| document.contains(&format!("/{program}:")))
        .unwrap_or_else(|| panic!("no pod of {program} in the rendered chart"));
    let arguments = document.lines().filter_map(|line| {
        let (flag, value) = line.trim().strip_prefix("- --")?.split_once('=')?;
        Some((flag.to_owned(), value.trim_matches('"').to_owned()))
    });
    arguments.collect()
}

/// Returns the defaults of a program's flags by their long names.
fn flag_defaults(command: clap::Command) -> BTreeMap<String, Option<String>> {
    let default = |arg: &clap::Arg| {
        let values = arg.get_default_values().iter();
        values.map(|value| value.to_string_lossy().into_owned()).reduce(|a, b| format!("{a} {b}"))
    };
    let flags = command.get_arguments();
    flags.filter_map(|arg| Some((arg.get_long()?.to_owned(), default(arg)))).collect()
}

#[test]
fn chart_has_the_defaults_of_the_flags() {
    let programs = [
        ("tessera-controller", tessera_controller::Args::command()),
        ("tessera-driver", tessera_driver::args::DriverArgs::command()),
    ];
    let mut compared = 0;
    for (program, command) in programs {
        let defaults = flag_defaults(command);
        for (flag, value) in chart_arguments(program) {
            let default =
                defaults.get(&flag).unwrap_or_else(|| panic!("{program} has no flag --{flag}"));
            if !DIFFERENT.iter().any(|(different, _)| *different == flag) {
                assert_eq!(Some(&value), default.as_ref(), "{program} --{flag}");
                compared += 1;
            }
        }
    }
    assert!(compared >= 12, "only {compared} flags were compared");
}
