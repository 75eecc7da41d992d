//! CPU time and memory of the control plane's processes, read from /proc.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context;
use serde::{Deserialize, Serialize};

/// Clock ticks per second in /proc (`USER_HZ`); 100 on every supported architecture.
const TICKS_PER_SECOND: f64 = 100.0;

/// Resource usage of one process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    /// CPU time in user and kernel mode, in seconds.
    pub cpu_s: f64,
    /// Peak resident memory in MiB.
    pub peak_rss_mib: f64,
}

/// Usage of each component, by name.
pub type Usages = BTreeMap<String, Usage>;

/// Reads the usage of each component. Each file in `pids` is named after a component; its first
/// word is the process ID.
///
/// # Errors
/// Returns an error if a process has exited or if the directory contains other files.
pub fn read(pids: &Path) -> anyhow::Result<Usages> {
    let entries =
        std::fs::read_dir(pids).with_context(|| format!("cannot read {}", pids.display()))?;
    let mut usages = Usages::new();
    for entry in entries {
        let entry = entry?;
        let component = entry.file_name().to_string_lossy().into_owned();
        let pid = std::fs::read_to_string(entry.path())?;
        let process = Path::new("/proc").join(pid.split_whitespace().next().unwrap_or_default());
        let read = |file: &str| {
            std::fs::read_to_string(process.join(file))
                .with_context(|| format!("{component} has exited"))
        };
        let cpu_s = cpu_seconds(&read("stat")?)
            .with_context(|| format!("invalid CPU time of {component}"))?;
        let peak_rss_mib = peak_mib(&read("status")?)
            .with_context(|| format!("invalid peak memory of {component}"))?;
        usages.insert(component, Usage { cpu_s, peak_rss_mib });
    }
    Ok(usages)
}

/// Returns the CPU time between two readings, and the peak memory of the later one.
pub fn between(before: &Usages, after: &Usages) -> Usages {
    let since = |(name, after): (&String, &Usage)| {
        let before = before.get(name).copied().unwrap_or_default();
        (name.clone(), Usage { cpu_s: after.cpu_s - before.cpu_s, ..*after })
    };
    after.iter().map(since).collect()
}

/// Returns the CPU time of all processes of the machine, in seconds.
///
/// # Errors
/// Returns an error if /proc cannot be read.
pub fn of_machine() -> anyhow::Result<f64> {
    let stat = std::fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    busy_seconds(&stat).context("invalid CPU time in /proc/stat")
}

/// Returns the CPU time of this process, in seconds.
///
/// # Errors
/// Returns an error if /proc cannot be read.
pub fn of_this_process() -> anyhow::Result<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").context("cannot read /proc/self/stat")?;
    cpu_seconds(&stat).context("invalid CPU time in /proc/self/stat")
}

/// Parses `/proc/stat`. Idle time and I/O wait are excluded, as is guest time, which is part of
/// user time.
fn busy_seconds(stat: &str) -> Option<f64> {
    let fields: Vec<f64> = stat
        .lines()
        .next()?
        .strip_prefix("cpu ")?
        .split_whitespace()
        .flat_map(str::parse)
        .collect();
    let [user, nice, system, _idle, _waiting, interrupts, softirqs, ..] = fields[..] else {
        return None;
    };
    Some((user + nice + system + interrupts + softirqs) / TICKS_PER_SECOND)
}

/// Parses fields 14 and 15 of `/proc/PID/stat`. Fields are counted after the name, which may
/// contain any character.
fn cpu_seconds(stat: &str) -> Option<f64> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |field: usize| fields.get(field - 3)?.parse::<f64>().ok();
    Some((ticks(14)? + ticks(15)?) / TICKS_PER_SECOND)
}

/// Parses `VmHWM` of `/proc/PID/status`.
fn peak_mib(status: &str) -> Option<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<f64>().ok()? / 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_cpu_time_after_any_process_name() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 1 0 0 0 250 50 0 0 20 0 5 0 100 1 1";
        assert_eq!(cpu_seconds(stat), Some(3.0));
        assert_eq!(cpu_seconds("7 (a) S 1"), None);
    }

    #[test]
    fn idle_time_is_not_counted() {
        assert_eq!(
            busy_seconds("cpu  100 20 30 999 88 40 10 0 0 0\ncpu0 1 1 1 1 1 1 1 0 0 0"),
            Some(2.0)
        );
        assert_eq!(busy_seconds("cpu"), None);
    }

    #[test]
    fn reads_usage_of_own_process() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("this"), format!("{} 4711\n", std::process::id()))
            .unwrap();
        let usage = read(directory.path()).unwrap()["this"];
        assert!(usage.peak_rss_mib > 0.1, "{usage:?}");
    }

    #[test]
    fn exited_process_is_named_in_error() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("kube-scheduler"), "4194305").unwrap();
        let error = read(directory.path()).unwrap_err().to_string();
        assert_eq!(error, "kube-scheduler has exited");
    }

    #[test]
    fn subtracts_cpu_time_and_keeps_last_peak() {
        let usage = |cpu_s, peak_rss_mib| {
            Usages::from([("etcd".to_owned(), Usage { cpu_s, peak_rss_mib })])
        };
        assert_eq!(between(&usage(1.0, 50.0), &usage(4.0, 60.0)), usage(3.0, 60.0));
    }
}
