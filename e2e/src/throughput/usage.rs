//! What the processes of the control plane use, as /proc says.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context;
use serde::{Deserialize, Serialize};

/// Ticks per second in /proc: the same on every architecture that Linux still has (`USER_HZ`).
const TICKS_PER_SECOND: f64 = 100.0;

/// What one process has used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    /// CPU time in user and kernel mode, seconds.
    pub cpu_s: f64,
    /// The most memory that it ever had, MiB.
    pub peak_rss_mib: f64,
}

/// The usage of each component, by its name.
pub type Usages = BTreeMap<String, Usage>;

/// Reads the usage of every component whose process number is the first word of a file of that
/// directory, named as the component.
///
/// # Errors
/// A process has ended, or the directory holds something else.
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
                .with_context(|| format!("{component} has ended"))
        };
        let cpu_s =
            cpu_seconds(&read("stat")?).with_context(|| format!("no CPU time of {component}"))?;
        let peak_rss_mib =
            peak_mib(&read("status")?).with_context(|| format!("no memory of {component}"))?;
        usages.insert(component, Usage { cpu_s, peak_rss_mib });
    }
    Ok(usages)
}

/// CPU time between two readings, and the peak of the later one.
pub fn between(before: &Usages, after: &Usages) -> Usages {
    let since = |(name, after): (&String, &Usage)| {
        let before = before.get(name).copied().unwrap_or_default();
        (name.clone(), Usage { cpu_s: after.cpu_s - before.cpu_s, ..*after })
    };
    after.iter().map(since).collect()
}

/// CPU time of everything on the machine, seconds.
///
/// # Errors
/// /proc cannot be read.
pub fn of_machine() -> anyhow::Result<f64> {
    let stat = std::fs::read_to_string("/proc/stat").context("cannot read /proc/stat")?;
    busy_seconds(&stat).context("no CPU time in /proc/stat")
}

/// CPU time of this process, seconds.
///
/// # Errors
/// /proc cannot be read.
pub fn of_this_process() -> anyhow::Result<f64> {
    let stat = std::fs::read_to_string("/proc/self/stat").context("cannot read /proc/self/stat")?;
    cpu_seconds(&stat).context("no CPU time in /proc/self/stat")
}

/// From `/proc/stat`: all but idle time, waiting for input and output, and what guests used, which
/// is counted twice.
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

/// From `/proc/PID/stat`: fields 14 and 15, counted after the name, which may hold anything.
fn cpu_seconds(stat: &str) -> Option<f64> {
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = |field: usize| fields.get(field - 3)?.parse::<f64>().ok();
    Some((ticks(14)? + ticks(15)?) / TICKS_PER_SECOND)
}

/// From `/proc/PID/status`.
fn peak_mib(status: &str) -> Option<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<f64>().ok()? / 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_time_is_found_behind_any_name() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 1 0 0 0 250 50 0 0 20 0 5 0 100 1 1";
        assert_eq!(cpu_seconds(stat), Some(3.0));
        assert_eq!(cpu_seconds("7 (a) S 1"), None);
    }

    #[test]
    fn an_idle_machine_uses_nothing() {
        assert_eq!(
            busy_seconds("cpu  100 20 30 999 88 40 10 0 0 0\ncpu0 1 1 1 1 1 1 1 0 0 0"),
            Some(2.0)
        );
        assert_eq!(busy_seconds("cpu"), None);
    }

    #[test]
    fn our_own_process_has_used_something() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("this"), format!("{} 4711\n", std::process::id()))
            .unwrap();
        let usage = read(directory.path()).unwrap()["this"];
        assert!(usage.peak_rss_mib > 0.1, "{usage:?}");
    }

    #[test]
    fn a_process_that_has_ended_is_named() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("kube-scheduler"), "4194305").unwrap();
        let error = read(directory.path()).unwrap_err().to_string();
        assert_eq!(error, "kube-scheduler has ended");
    }

    #[test]
    fn time_is_the_difference_and_the_peak_is_the_last() {
        let usage = |cpu_s, peak_rss_mib| {
            Usages::from([("etcd".to_owned(), Usage { cpu_s, peak_rss_mib })])
        };
        assert_eq!(between(&usage(1.0, 50.0), &usage(4.0, 60.0)), usage(3.0, 60.0));
    }
}
