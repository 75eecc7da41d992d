//! Finds the slots of processes that NVML reports.

use std::collections::BTreeMap;

use tessera_intercept_abi::ProcessReport;

use super::{
    ShareUsage,
    process::{FileIdentity, HostProcess, ProcFs},
};

/// The processes of the host, as `/proc` showed them when they were first asked for.
///
/// A PID names another process after some time, so its start time is read at each call.
#[derive(Debug)]
pub struct Owners {
    proc: ProcFs,
    known: BTreeMap<u32, KnownProcess>,
}

/// A process, and whether it has ledgers mapped. A slot is only written through a mapping, so the
/// answer for a ledger does not change while the process has a slot in it.
#[derive(Debug)]
struct KnownProcess {
    process: HostProcess,
    mapped: BTreeMap<FileIdentity, bool>,
}

impl Owners {
    /// Returns the processes that `proc` shows.
    #[must_use]
    pub fn new(proc: ProcFs) -> Self {
        Self { proc, known: BTreeMap::new() }
    }

    /// Returns the process with this PID, or `None` if it has exited or is not visible.
    pub fn process(&mut self, pid: u32) -> Option<&HostProcess> {
        self.known(pid).map(|known| &known.process)
    }

    /// Returns true if the process has a file mapped.
    pub fn maps(&mut self, pid: u32, file: FileIdentity) -> bool {
        let proc = self.proc.clone();
        self.known(pid)
            .is_some_and(|known| *known.mapped.entry(file).or_insert_with(|| proc.maps(pid, file)))
    }

    /// Forgets all processes but these.
    pub fn retain(&mut self, is_wanted: impl Fn(u32) -> bool) {
        self.known.retain(|pid, _| is_wanted(*pid));
    }

    /// Returns the slots of a process in the ledgers of `shares`, each with the index of its share.
    ///
    /// A slot identifies its process as the process's own `/proc` shows it. Without such a slot (no
    /// `/proc`, or a time namespace with another origin), a slot with the host PID of the process
    /// counts. Any process of the container could have written that PID, so the process must have
    /// the ledger mapped, as the kernel reports.
    pub fn slots<'s>(
        &mut self,
        shares: &[&'s ShareUsage],
        pid: u32,
    ) -> Vec<(usize, &'s ProcessReport)> {
        let Some(process) = self.process(pid) else { return Vec::new() };
        let itself = (process.own_pid, process.pid_namespace, process.start_ticks);
        let slots = || {
            shares.iter().enumerate().flat_map(|(at, share)| {
                let usage = share.usage.iter();
                usage.flat_map(move |usage| usage.processes.iter().map(move |slot| (at, slot)))
            })
        };
        let by_itself = |(_, slot): &(usize, &ProcessReport)| {
            (slot.pid, slot.pid_namespace, slot.start_ticks) == itself
        };
        let own: Vec<_> = slots().filter(by_itself).collect();
        if !own.is_empty() {
            return own;
        }
        let by_host = slots().filter(|(_, slot)| slot.host_pid == Some(pid));
        let by_host: Vec<_> = by_host.collect();
        let file_of = |at: usize| shares[at].usage.as_ref().ok().map(|usage| usage.file);
        let has_mapped = |(at, _): &(usize, &ProcessReport)| {
            file_of(*at).is_some_and(|file| self.maps(pid, file))
        };
        by_host.into_iter().filter(has_mapped).collect()
    }

    fn known(&mut self, pid: u32) -> Option<&mut KnownProcess> {
        let is_same = self
            .known
            .get(&pid)
            .is_some_and(|known| self.proc.start_ticks(pid) == Some(known.process.start_ticks));
        if !is_same {
            self.known.remove(&pid);
            let process = self.proc.process(pid)?;
            self.known.insert(pid, KnownProcess { process, mapped: BTreeMap::new() });
        }
        self.known.get_mut(&pid)
    }
}
