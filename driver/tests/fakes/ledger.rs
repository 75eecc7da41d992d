//! Ledgers and processes that a test writes.

use std::{
    fs::{self, File},
    mem::offset_of,
    os::unix::fs::{FileExt, symlink},
    path::PathBuf,
};

use nix::{
    fcntl::{FcntlArg, fcntl},
    libc,
};
use tessera_api::names::{ClaimDeviceName, ClaimUid};
use tessera_gpu::GpuProcess;
use tessera_intercept_abi::{
    SlotPage,
    ledger::{HEADER_LEN, LOCK_OFFSET, SLOT_LEN, SLOT_LIVE},
};

use super::node::{Node, share_id, uid};

/// Bytes of a MiB.
pub const MIB: u64 = 1 << 20;

/// The ledger of a claim's only share, written by the claim's processes.
pub struct Ledger(pub File);

impl Ledger {
    /// Opens it.
    pub fn of(node: &Node, claim: &str) -> Self {
        let file =
            File::options().read(true).write(true).open(path(node, claim)).expect("a ledger");
        Self(file)
    }

    /// Writes a word.
    pub fn word(&self, at: usize, value: u64) {
        self.0.write_all_at(&value.to_le_bytes(), at as u64).expect("written");
    }

    /// Writes a slot with a process and its bytes.
    pub fn process(&self, slot: usize, pid: u32, bytes: u64) {
        let at = HEADER_LEN + slot * SLOT_LEN;
        self.word(at + offset_of!(SlotPage, start_ticks), u64::from(pid) * 10);
        self.word(at + offset_of!(SlotPage, pid_namespace), NAMESPACE);
        self.word(at + offset_of!(SlotPage, used_bytes), bytes);
        self.word(at + offset_of!(SlotPage, launches), 7);
        self.word(at, u64::from(SLOT_LIVE) | u64::from(pid) << 32);
    }

    /// Locks a slot, as a living process does, until the returned file is dropped.
    pub fn lives(node: &Node, claim: &str, slot: usize) -> File {
        let own = Self::of(node, claim);
        own.lock(slot);
        own.0
    }

    /// Locks the byte with this number, counted from the lock of slot 0.
    pub fn lock(&self, byte: usize) {
        let lock = libc::flock {
            l_type: libc::F_WRLCK as libc::c_short,
            l_whence: libc::SEEK_SET as libc::c_short,
            l_start: (LOCK_OFFSET + byte as u64) as libc::off_t,
            l_len: 1,
            l_pid: 0,
        };
        fcntl(&self.0, FcntlArg::F_OFD_SETLK(&lock)).expect("locked");
    }
}

/// Returns the path of the ledger of a claim's only share.
pub fn path(node: &Node, claim: &str) -> PathBuf {
    node.paths().ledger(&share(claim))
}

/// Returns the name of a claim's only share.
pub fn share(claim: &str) -> ClaimDeviceName {
    let claim_uid = ClaimUid::new(uid(claim)).expect("a UID");
    ClaimDeviceName::of_result(&claim_uid, 0, Some(&share_id(claim, 0))).expect("a name")
}

/// The PID namespace of all processes.
pub const NAMESPACE: u64 = 4_026_531_836;
/// The UID of the pod.
pub const POD: &str = "1f0c2d3e-9a41-4c3b-8e55-0d6f2b1a4c77";

/// Adds a process to /proc, in this cgroup, with ten times its PID as start time.
pub fn show(node: &Node, pid: u32, cgroup: &str) {
    let directory = node.path("proc").join(pid.to_string());
    fs::create_dir_all(directory.join("ns")).expect("made");
    let start = u64::from(pid) * 10;
    let write = |name: &str, text: String| fs::write(directory.join(name), text).expect("written");
    write("status", format!("Name:\tpython\nNSpid:\t99{pid}\t{pid}\n"));
    write(
        "stat",
        format!("99{pid} (python) S 1 1 1 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 {start} 0 0"),
    );
    write("cgroup", format!("0::{cgroup}\n"));
    symlink(format!("pid:[{NAMESPACE}]"), directory.join("ns/pid")).expect("linked");
}

/// Returns a cgroup of the pod.
pub fn of_pod() -> String {
    format!("/kubepods/burstable/pod{POD}/4f2a")
}

/// Returns a process that holds memory.
pub fn holds(pid: u32, mebibytes: u64) -> GpuProcess {
    GpuProcess { pid, bytes: Some(mebibytes * MIB) }
}
