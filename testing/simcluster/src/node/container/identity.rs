//! Identity of a container's program: user, capabilities and user namespace; and its exec.

use std::convert::Infallible;
use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use rustix::process::{DumpableBehavior, Gid, Uid, getegid, geteuid, set_dumpable_behavior};
use rustix::thread::{
    CapabilitySet, UnshareFlags, remove_capability_from_bounding_set, set_no_new_privs,
    set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};

use super::rootfs::SetupError;
use super::spec::{InitSpec, RunAs};
use crate::node::namespaces;

/// First host id of containers with a user namespace of their own, far above ids of real users.
const FIRST_HOST_ID: u32 = 1_000_000;

/// Capabilities that container runtimes leave to root in a container.
const DEFAULT_CAPABILITIES: [CapabilitySet; 14] = [
    CapabilitySet::CHOWN,
    CapabilitySet::DAC_OVERRIDE,
    CapabilitySet::FOWNER,
    CapabilitySet::FSETID,
    CapabilitySet::KILL,
    CapabilitySet::SETGID,
    CapabilitySet::SETUID,
    CapabilitySet::SETPCAP,
    CapabilitySet::NET_BIND_SERVICE,
    CapabilitySet::NET_RAW,
    CapabilitySet::SYS_CHROOT,
    CapabilitySet::MKNOD,
    CapabilitySet::AUDIT_WRITE,
    CapabilitySet::SETFCAP,
];

pub(crate) fn set_hostname(name: &str) -> Result<(), SetupError> {
    rustix::system::sethostname(name.as_bytes()).map_err(failed("the host name"))
}

fn failed<E: Into<io::Error>>(what: &'static str) -> impl Fn(E) -> SetupError {
    move |error| SetupError::Identity { what, source: error.into() }
}

/// Becomes the program of `spec`.
pub(crate) fn exec(spec: &InitSpec) -> Result<Infallible, SetupError> {
    let (program, arguments) = spec.command.split_first().ok_or(SetupError::NoCommand)?;
    drop_capabilities().map_err(failed("capabilities"))?;
    let mut command = Command::new(program);
    command
        .args(arguments)
        .env_clear()
        .envs(&spec.env)
        .current_dir(&spec.working_dir)
        .stdin(Stdio::null());
    let RunAs { uid, gid, groups } = &spec.user;
    if spec.user_namespace || !is_mapped(*uid, *gid).map_err(failed("the user"))? {
        enter_user_namespace(*uid, *gid).map_err(failed("the user namespace"))?;
    } else if can_set_groups() {
        become_user(*uid, *gid, groups).map_err(failed("the user"))?;
    }
    if spec.no_new_privileges {
        set_no_new_privs(true).map_err(failed("no_new_privs"))?;
    }
    Err(SetupError::Exec { program: program.clone(), source: command.exec() })
}

fn drop_capabilities() -> io::Result<()> {
    let kept = DEFAULT_CAPABILITIES.into_iter().fold(CapabilitySet::empty(), |all, one| all | one);
    for bit in 0..64 {
        let one = CapabilitySet::from_bits_retain(1 << bit);
        if kept.contains(one) {
            continue;
        }
        match remove_capability_from_bounding_set(one) {
            Ok(()) => {}
            // First capability number that this kernel does not support.
            Err(rustix::io::Errno::INVAL) => break,
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Returns true if both ids exist in the current user namespace. Without root there is usually only
/// one.
fn is_mapped(uid: u32, gid: u32) -> io::Result<bool> {
    Ok(map_holds(&fs::read_to_string("/proc/self/uid_map")?, uid)
        && map_holds(&fs::read_to_string("/proc/self/gid_map")?, gid))
}

fn map_holds(map: &str, id: u32) -> bool {
    map.lines().any(|line| {
        let mut fields = line.split_whitespace().map(str::parse::<u64>);
        match (fields.next(), fields.next(), fields.next()) {
            (Some(Ok(first)), Some(Ok(_)), Some(Ok(count))) => {
                (first..first + count).contains(&u64::from(id))
            }
            _ => false,
        }
    })
}

/// Returns false in a user namespace created without root, where the groups cannot be changed.
fn can_set_groups() -> bool {
    !fs::read_to_string("/proc/self/setgroups").is_ok_and(|setting| setting.trim() == "deny")
}

fn become_user(uid: u32, gid: u32, groups: &[u32]) -> io::Result<()> {
    set_thread_groups(&groups.iter().copied().map(Gid::from_raw).collect::<Vec<_>>())?;
    let gid = Gid::from_raw(gid);
    set_thread_res_gid(gid, gid, gid)?;
    let uid = Uid::from_raw(uid);
    Ok(set_thread_res_uid(uid, uid, uid)?)
}

/// Enters a user namespace in which the caller has these ids.
///
/// With root, its host id is one that no other process has, as the kubelet gives to pods with
/// `hostUsers: false`. Without root, it is the only available id.
fn enter_user_namespace(uid: u32, gid: u32) -> io::Result<()> {
    let host = FIRST_HOST_ID.saturating_add(uid);
    if is_mapped(host, host)? {
        become_user(host, host, &[])?;
        // Changing ids hides /proc/self from its own process, and the maps must be written there.
        set_dumpable_behavior(DumpableBehavior::Dumpable)?;
    }
    let (outer_uid, outer_gid) = (geteuid().as_raw(), getegid().as_raw());
    namespaces::unshare(UnshareFlags::NEWUSER)?;
    namespaces::map(uid, outer_uid, gid, outer_gid)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_is_mapped_only_inside_a_range() {
        let one = "         0       1000          1\n";
        assert!(map_holds(one, 0));
        assert!(!map_holds(one, 1));
        let all = "0 0 4294967295\n";
        assert!(map_holds(all, 1_000_000));
        assert!(!map_holds("", 0));
    }
}
