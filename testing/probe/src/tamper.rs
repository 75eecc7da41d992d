//! Attacks of a tenant on grants and ledgers, for tests that check their effect.
//!
//! Any program in the container could do the same; nothing here uses the interceptor or the driver.

use std::ffi::{CStr, CString};
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use serde::Serialize;
use tessera_intercept_abi::{
    GRANT_FILE, GRANTS_TMPFS_INODES, Grant, HOST_DIR, LEDGER_FILE, LEDGER_LEN, LEDGER_TMPFS_INODES,
    SHARES_DIR, Text, ledger,
};

use crate::report::Failure;

/// An attack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Tamper {
    /// Create a grant of eight times the memory, and a ledger, as files in `--forge-into`.
    ForgeGrant,
    /// Create them in new user and mount namespaces, mounted like those of the driver and the
    /// runtime.
    ForgeByMounting,
    /// Truncate every ledger.
    TruncateLedger,
    /// Zero every ledger.
    ZeroLedger,
    /// Reset the first page of every ledger to that of a new one: no usage, regardless of its
    /// slots.
    ResetLedger,
    /// Extend every ledger and write beyond its end.
    GrowLedger,
    /// Fill every ledger with pseudo-random bytes.
    ScrambleLedger,
    /// Write to /dev until it is full.
    FillDev,
}

/// Result of an attack.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Tampered {
    how: Tamper,
    /// Bytes written beyond the permitted memory.
    gained_bytes: u64,
    /// Last error of the kernel, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    refused_with: Option<String>,
}

/// Limit of the bytes written to an unlimited `/dev`.
const MAX_WRITTEN: u64 = 256 << 20;

/// Number of bytes by which a ledger is extended.
const GROWTH: u64 = 1 << 30;

/// Directory of the forged share, which is also its ID.
const FORGED: &str = "forged";

impl Tamper {
    /// Executes the attack. An error of the kernel is part of the result.
    pub(crate) fn attempt(self, forge_into: &Path, id: &str) -> Result<Tampered, Failure> {
        let outcome = match self {
            Self::ForgeGrant => forge(&forge_into.join(FORGED), id).map(|()| 0),
            Self::ForgeByMounting => forge_by_mounting().map(|()| 0),
            Self::TruncateLedger => change_every_ledger(|file| file.set_len(0).map(|()| 0)),
            Self::ZeroLedger => {
                change_every_ledger(|file| file.write_all_at(&[0; LEDGER_LEN], 0).map(|()| 0))
            }
            Self::ResetLedger => {
                change_every_ledger(|file| file.write_all_at(&first_page(), 0).map(|()| 0))
            }
            Self::ScrambleLedger => {
                change_every_ledger(|file| file.write_all_at(&random_bytes(), 0).map(|()| 0))
            }
            Self::GrowLedger => return grow_every_ledger().map_err(failure),
            Self::FillDev => return filled(Path::new("/dev/filler")).map_err(failure),
        };
        match outcome {
            Ok(gained_bytes) => Ok(Tampered { how: self, gained_bytes, refused_with: None }),
            Err(error) if error.raw_os_error().is_some() => {
                Ok(Tampered { how: self, gained_bytes: 0, refused_with: Some(error.to_string()) })
            }
            Err(error) => Err(failure(error)),
        }
    }
}

fn failure(error: io::Error) -> Failure {
    Failure {
        call: "tamper".to_owned(),
        code: error.raw_os_error().unwrap_or(-1),
        name: error.to_string(),
    }
}

/// Returns the directories of the container's shares, without that of the driver's socket.
fn shares() -> io::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(SHARES_DIR)?;
    let paths: Vec<_> =
        entries.map(|entry| entry.map(|entry| entry.path())).collect::<Result<_, _>>()?;
    Ok(paths.into_iter().filter(|path| path != Path::new(HOST_DIR)).collect())
}

fn change_every_ledger(tamper: impl Fn(&File) -> io::Result<u64>) -> io::Result<u64> {
    let mut gained = 0;
    for share in shares()? {
        gained += tamper(&OpenOptions::new().write(true).open(share.join(LEDGER_FILE))?)?;
    }
    Ok(gained)
}

/// Extends every ledger. Extension alone uses no memory; writing does.
fn grow_every_ledger() -> io::Result<Tampered> {
    let mut refused_with = None;
    let mut gained_bytes = 0;
    for share in shares()? {
        let file = OpenOptions::new().write(true).open(share.join(LEDGER_FILE))?;
        file.set_len(LEDGER_LEN as u64 + GROWTH)?;
        let (gained, refused) =
            count_written(|at, bytes| file.write_at(bytes, LEDGER_LEN as u64 + at));
        gained_bytes += gained;
        refused_with = refused.or(refused_with);
    }
    Ok(Tampered { how: Tamper::GrowLedger, gained_bytes, refused_with })
}

fn filled(path: &Path) -> io::Result<Tampered> {
    let mut file = File::create(path)?;
    let (gained_bytes, refused_with) = count_written(|_, bytes| file.write(bytes));
    Ok(Tampered { how: Tamper::FillDev, gained_bytes, refused_with })
}

/// Writes until the kernel returns an error; returns the bytes and the error.
fn count_written(mut write: impl FnMut(u64, &[u8]) -> io::Result<usize>) -> (u64, Option<String>) {
    let piece = [b'x'; 1 << 16];
    let mut total = 0;
    while total < MAX_WRITTEN {
        match write(total, &piece) {
            Ok(0) => return (total, Some("write returned 0".to_owned())),
            Ok(count) => total += count as u64,
            Err(error) => return (total, Some(error.to_string())),
        }
    }
    (total, None)
}

/// Returns the first page of a new ledger, which has the totals.
fn first_page() -> Vec<u8> {
    let mut page = ledger::initial().to_vec();
    page.resize(ledger::HEADER_LEN, 0);
    page
}

/// Returns deterministic pseudo-random bytes.
fn random_bytes() -> Vec<u8> {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state as u8
    };
    std::iter::repeat_with(next).take(LEDGER_LEN).collect()
}

/// Creates a share like one of the container's, with another ID and eight times the memory.
fn forge(directory: &Path, id: &str) -> io::Result<()> {
    let (grant, ledger) = forged(id)?;
    fs::create_dir_all(directory)?;
    fs::write(directory.join(GRANT_FILE), grant)?;
    fs::write(directory.join(LEDGER_FILE), ledger)
}

/// Returns such a grant and a new ledger.
fn forged(id: &str) -> io::Result<(Vec<u8>, Vec<u8>)> {
    let share = shares()?
        .into_iter()
        .find(|share| !share.ends_with(FORGED))
        .ok_or(io::ErrorKind::NotFound)?;
    let grant = Grant::parse(&fs::read(share.join(GRANT_FILE))?).map_err(io::Error::other)?;
    let id = Text::new(id).map_err(io::Error::other)?;
    let grant =
        Grant { id, memory_limit_bytes: grant.memory_limit_bytes * 8, sequence: 0, ..grant };
    let page = grant.encode().map_err(io::Error::other)?;
    let mut ledger = vec![0; LEDGER_LEN];
    let begin = ledger::initial();
    ledger[..begin.len()].copy_from_slice(&begin);
    Ok((page.to_vec(), ledger))
}

/// Forges a grant by mounting. Needs `CAP_SYS_ADMIN`, or unprivileged user namespaces.
fn forge_by_mounting() -> io::Result<()> {
    let (grant, ledger) = forged(FORGED)?;
    // SAFETY: neither call has arguments or fails.
    let (user, group) = unsafe { (libc::geteuid(), libc::getegid()) };
    // SAFETY: no pointers; the process has one thread.
    check(unsafe { libc::unshare(libc::CLONE_NEWUSER | libc::CLONE_NEWNS) })?;
    // Files on the tmpfs need an owner.
    fs::write("/proc/self/setgroups", "deny")?;
    fs::write("/proc/self/uid_map", format!("0 {user} 1"))?;
    fs::write("/proc/self/gid_map", format!("0 {group} 1"))?;
    let share = Path::new(SHARES_DIR).join(FORGED);
    fs::create_dir_all(&share)?;
    for (file, content, inodes) in
        [(GRANT_FILE, grant, GRANTS_TMPFS_INODES), (LEDGER_FILE, ledger, LEDGER_TMPFS_INODES)]
    {
        let (source, target) = (Path::new("/dev").join(file), share.join(file));
        fs::create_dir_all(&source)?;
        File::create(&target)?;
        mount(c"tmpfs", &source, c"tmpfs", 0, &format!("nr_inodes={inodes}"))?;
        let source = source.join(file);
        fs::write(&source, content)?;
        mount(&path(&source)?, &target, c"", libc::MS_BIND, "")?;
    }
    mount(c"", &share.join(GRANT_FILE), c"", libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY, "")
}

fn mount(
    from: &CStr,
    at: &Path,
    kind: &CStr,
    flags: libc::c_ulong,
    options: &str,
) -> io::Result<()> {
    let (at, options) = (path(at)?, CString::new(options)?);
    // SAFETY: all strings are terminated; the options are text.
    check(unsafe {
        libc::mount(from.as_ptr(), at.as_ptr(), kind.as_ptr(), flags, options.as_ptr().cast())
    })
}

fn path(path: &Path) -> io::Result<CString> {
    Ok(CString::new(path.as_os_str().as_bytes())?)
}

fn check(code: libc::c_int) -> io::Result<()> {
    if code == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}
