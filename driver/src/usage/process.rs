//! Identity of host processes, read from /proc.

use std::{
    fmt,
    fs::{self, File},
    io::{self, BufRead, BufReader, Read},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
};

use rustix::fs::{major, minor};

/// A process of the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostProcess {
    /// The PID in its own namespace.
    pub own_pid: u32,
    /// The inode of that namespace.
    pub pid_namespace: u64,
    /// The start time in clock ticks since boot.
    pub start_ticks: u64,
    /// The name in the kernel: the first 15 bytes of its program's name.
    pub name: String,
    /// The UID of its pod, or `None` if it is not in a pod.
    pub pod_uid: Option<String>,
}

impl fmt::Display for HostProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} in its own namespace)", self.name, self.own_pid)
    }
}

/// The identity of a file, independent of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileIdentity {
    device: u64,
    inode: u64,
}

impl FileIdentity {
    /// Returns the identity of an open file.
    ///
    /// # Errors
    /// The metadata cannot be read.
    pub fn of(file: &File) -> io::Result<Self> {
        Ok(Self::in_metadata(&file.metadata()?))
    }

    /// Returns the identity of the file at `path` without opening it; of a link, not of its target.
    ///
    /// # Errors
    /// The metadata cannot be read.
    pub fn at(path: &Path) -> io::Result<Self> {
        Ok(Self::in_metadata(&fs::symlink_metadata(path)?))
    }

    fn in_metadata(metadata: &fs::Metadata) -> Self {
        Self { device: metadata.dev(), inode: metadata.ino() }
    }

    /// Returns true if a line of `/proc/<pid>/maps` is of this file.
    fn is_in(&self, line: &str) -> bool {
        let mut fields = line.split_ascii_whitespace().skip(3);
        let (Some(device), Some(inode)) = (fields.next(), fields.next()) else { return false };
        device == format!("{:02x}:{:02x}", major(self.device), minor(self.device))
            && inode.parse() == Ok(self.inode)
    }
}

/// A `/proc` that shows the processes of the host: that of a pod with `hostPID`.
#[derive(Clone, Debug)]
pub struct ProcFs(PathBuf);

impl ProcFs {
    /// Returns the `/proc` mounted at `root`.
    #[must_use]
    pub fn new(root: impl Into<PathBuf>) -> Self {
        Self(root.into())
    }

    /// Returns the process with this PID, or `None` if it has exited or is not visible.
    #[must_use]
    pub fn process(&self, pid: u32) -> Option<HostProcess> {
        let directory = self.0.join(pid.to_string());
        let status = fs::read_to_string(directory.join("status")).ok()?;
        let own_pid = line(&status, "NSpid:")?.split_whitespace().last()?.parse().ok()?;
        let name = line(&status, "Name:")?.trim().to_owned();
        let start_ticks = self.start_ticks(pid)?;
        let cgroup = fs::read_to_string(directory.join("cgroup")).unwrap_or_default();
        let pid_namespace = namespace(&directory.join("ns/pid"))?;
        Some(HostProcess { own_pid, pid_namespace, start_ticks, name, pod_uid: pod_uid(&cgroup) })
    }

    /// Returns the start time of a process in clock ticks since boot, or `None` if it has exited or
    /// is not visible.
    #[must_use]
    pub fn start_ticks(&self, pid: u32) -> Option<u64> {
        start_ticks(&fs::read_to_string(self.0.join(pid.to_string()).join("stat")).ok()?)
    }

    /// Returns true if the process has a file mapped, as the kernel reports. Only the first 16 MiB
    /// of its list of mappings are read: a process can make the list as long as it wants.
    #[must_use]
    pub fn maps(&self, pid: u32, file: FileIdentity) -> bool {
        const MAX_BYTES: u64 = 16 << 20;
        let Ok(maps) = File::open(self.0.join(pid.to_string()).join("maps")) else { return false };
        let lines = BufReader::new(maps.take(MAX_BYTES)).split(b'\n').map_while(Result::ok);
        lines.into_iter().any(|line| file.is_in(&String::from_utf8_lossy(&line)))
    }
}

fn line<'s>(status: &'s str, key: &str) -> Option<&'s str> {
    status.lines().find_map(|line| line.strip_prefix(key))
}

/// Returns field 22 of `stat`. The second field, the name in brackets, may contain any character.
fn start_ticks(stat: &str) -> Option<u64> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(19)?.parse().ok()
}

/// Returns the inode in a link such as `pid:[4026531836]`.
fn namespace(link: &Path) -> Option<u64> {
    let target = fs::read_link(link).ok()?;
    target.to_str()?.strip_prefix("pid:[")?.strip_suffix(']')?.parse().ok()
}

/// Returns the UID of the pod in a cgroup path of the kubelet: `pod<uid>`, with `_` for `-` in
/// paths of systemd.
fn pod_uid(cgroup: &str) -> Option<String> {
    const UID: usize = 36;
    let of_part = |part: &str| {
        let after = &part[part.rfind("pod")? + 3..];
        let uid = after.get(..UID)?.replace('_', "-");
        let is_uid = uid.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
        (is_uid && uid.matches('-').count() == 4).then_some(uid)
    };
    cgroup.split(['/', '\n']).find_map(of_part)
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "1f0c2d3e-9a41-4c3b-8e55-0d6f2b1a4c77";

    #[test]
    fn finds_pod_in_cgroups_of_systemd_and_cgroupfs() {
        let systemd = UID.replace('-', "_");
        for group in [
            format!("0::/kubepods/burstable/pod{UID}/4f2a"),
            format!(
                "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{systemd}.slice/cri-containerd-4f.scope"
            ),
            format!("0::/../../pod{UID}/4f2a"),
            format!("12:memory:/user.slice\n11:cpu:/kubepods/besteffort/pod{UID}/4f2a\n"),
        ] {
            assert_eq!(pod_uid(&group).as_deref(), Some(UID), "{group}");
        }
        for group in ["0::/system.slice/containerd.service", "0::/podman/abc", "0::/pod1234", ""] {
            assert_eq!(pod_uid(group), None, "{group}");
        }
    }

    #[test]
    fn reads_own_process() {
        let this = ProcFs::new("/proc").process(std::process::id()).expect("it lives");
        assert!(this.start_ticks > 0 && this.pid_namespace > 0, "{this:?}");
        assert_eq!(ProcFs::new("/proc").process(this.own_pid), Some(this));
    }

    #[test]
    fn mapping_matches_by_device_and_inode() {
        let line =
            "7f3c1a000000-7f3c1a00f000 rw-s 00000000 00:5a 1234      /dev/tessera/a-0/ledger";
        let file = |minor, inode| FileIdentity { device: rustix::fs::makedev(0, minor), inode };
        assert!(file(0x5a, 1234).is_in(line));
        assert!(!file(0x5b, 1234).is_in(line) && !file(0x5a, 1235).is_in(line));
        assert!(!file(0x5a, 1234).is_in("7ffd0000-7ffd1000 rw-p 00000000 00:00 0   [stack]"));
        assert!(!file(0x5a, 1234).is_in(""));
    }

    #[test]
    fn reads_own_mappings() {
        let program = File::open("/proc/self/exe").expect("a program");
        let program = FileIdentity::of(&program).expect("metadata");
        let other = tempfile::tempfile().expect("a file");
        let other = FileIdentity::of(&other).expect("metadata");
        let (proc, this) = (ProcFs::new("/proc"), std::process::id());
        assert!(proc.maps(this, program) && !proc.maps(this, other));
    }

    #[test]
    fn reads_start_time_after_any_program_name() {
        let stat =
            "4711 (a) S 1 (b) R 1 4711 4711 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 987654 0 0";
        assert_eq!(start_ticks(stat), Some(987_654));
    }

    #[test]
    fn exited_process_returns_none() {
        let empty = tempfile::tempdir().expect("a directory");
        assert_eq!(ProcFs::new(empty.path()).process(1), None);
    }
}
