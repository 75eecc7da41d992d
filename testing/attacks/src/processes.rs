//! Tessera's processes on this machine and their use of resources, read from /proc.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::Context as _;

/// Clock ticks per second in /proc (`USER_HZ`); 100 on every supported architecture.
const TICKS_PER_SECOND: f64 = 100.0;

/// A running program.
#[derive(Clone, Debug)]
pub struct Process {
    /// Process ID as seen by this process.
    pub pid: u32,
    arguments: Vec<String>,
}

/// Resources that a process uses.
#[derive(Clone, Copy, Debug)]
pub struct ProcessUsage {
    /// CPU time in user and kernel mode, in seconds.
    pub cpu_s: f64,
    /// Resident memory in MiB.
    pub rss_mib: f64,
    /// Highest resident memory in MiB.
    pub peak_rss_mib: f64,
}

impl Process {
    /// Returns the process with that ID; `None` if it has exited.
    pub fn find(pid: u32) -> Option<Self> {
        let command_line = std::fs::read(directory(pid).join("cmdline")).ok()?;
        let text = String::from_utf8_lossy(&command_line);
        let arguments: Vec<_> = text.split_terminator('\0').map(str::to_owned).collect();
        (!arguments.is_empty()).then_some(Self { pid, arguments })
    }

    /// Returns the name of the program's file.
    pub fn program(&self) -> &str {
        self.arguments[0].rsplit('/').next().unwrap_or_default()
    }

    /// Returns the value after a flag of the command line.
    pub fn argument(&self, flag: &str) -> Option<&str> {
        let at = self.arguments.iter().position(|argument| argument == flag)?;
        self.arguments.get(at + 1).map(String::as_str)
    }

    /// Returns the program and, for a driver, its node.
    pub fn label(&self) -> String {
        match self.argument("--node-name") {
            Some(node) => format!("{} {node}", self.program()),
            None => self.program().to_owned(),
        }
    }

    /// Returns a path of the process as a path of this process.
    pub fn path(&self, path: &str) -> PathBuf {
        directory(self.pid).join("root").join(path.trim_start_matches('/'))
    }

    /// Returns the number of open files.
    ///
    /// # Errors
    /// Returns an error if the process has exited.
    pub fn open_files(&self) -> anyhow::Result<usize> {
        let files = std::fs::read_dir(directory(self.pid).join("fd"));
        Ok(files.with_context(|| self.exited())?.count())
    }

    /// Returns the resources in use.
    ///
    /// # Errors
    /// Returns an error if the process has exited.
    pub fn usage(&self) -> anyhow::Result<ProcessUsage> {
        let read = |file: &str| {
            std::fs::read_to_string(directory(self.pid).join(file)).with_context(|| self.exited())
        };
        let (stat, status) = (read("stat")?, read("status")?);
        let cpu_s = cpu_seconds(&stat).with_context(|| self.exited())?;
        let mib = |field: &str| mib(&status, field).with_context(|| self.exited());
        Ok(ProcessUsage { cpu_s, rss_mib: mib("VmRSS:")?, peak_rss_mib: mib("VmHWM:")? })
    }

    fn exited(&self) -> String {
        format!("{} (PID {}) has exited", self.label(), self.pid)
    }
}

/// Returns controller and drivers among the descendants of a process, in the order of their labels.
///
/// # Errors
/// Returns an error if /proc cannot be read.
pub fn tessera_below(ancestor: u32) -> anyhow::Result<Vec<Process>> {
    let parents = parents()?;
    let is_below = |pid: u32| {
        std::iter::successors(Some(pid), |pid| parents.get(pid).copied()).any(|pid| pid == ancestor)
    };
    let mut found: Vec<_> = parents
        .keys()
        .filter(|pid| is_below(**pid))
        .filter_map(|pid| Process::find(*pid))
        .filter(|process| ["tessera-controller", "tessera-driver"].contains(&process.program()))
        .collect();
    found.sort_by_key(Process::label);
    Ok(found)
}

/// Returns the parent of each process.
fn parents() -> anyhow::Result<BTreeMap<u32, u32>> {
    let mut parents = BTreeMap::new();
    for entry in std::fs::read_dir("/proc").context("cannot read /proc")? {
        let Ok(pid) = entry?.file_name().to_string_lossy().parse::<u32>() else { continue };
        // A process may exit at any time.
        let stat = std::fs::read_to_string(directory(pid).join("stat")).unwrap_or_default();
        if let Some(parent) = field(&stat, 4).and_then(|parent| parent.parse().ok()) {
            parents.insert(pid, parent);
        }
    }
    Ok(parents)
}

fn directory(pid: u32) -> PathBuf {
    Path::new("/proc").join(pid.to_string())
}

/// Returns a field of `/proc/PID/stat` after the name, which may contain any character.
fn field(stat: &str, number: usize) -> Option<&str> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(number - 3)
}

fn cpu_seconds(stat: &str) -> Option<f64> {
    let ticks = |number: usize| field(stat, number)?.parse::<f64>().ok();
    Some((ticks(14)? + ticks(15)?) / TICKS_PER_SECOND)
}

fn mib(status: &str, name: &str) -> Option<f64> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.trim().strip_suffix("kB")?.trim().parse::<f64>().ok()? / 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_fields_after_any_process_name() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194560 1 0 0 0 250 50 0 0 20 0 5 0 100 1 1";
        assert_eq!(field(stat, 4), Some("1"));
        assert_eq!(cpu_seconds(stat), Some(3.0));
        assert_eq!(cpu_seconds("7 (a) S 1"), None);
    }

    #[test]
    fn reads_usage_of_own_process() {
        let own = Process::find(std::process::id()).expect("this process runs");
        let usage = own.usage().expect("this process runs");
        assert!(usage.rss_mib > 0.1 && usage.peak_rss_mib >= usage.rss_mib, "{usage:?}");
        assert!(own.open_files().expect("this process runs") > 2);
        assert!(own.path("/proc").is_dir());
    }
}
