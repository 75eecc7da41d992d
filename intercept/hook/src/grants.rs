//! Grants of the container: `/dev/tessera/<id>/{grant,ledger}`.
//!
//! Files that a tenant can create are ignored. Both files must be roots of mounts, and the grant's
//! mount must be read-only; and both must be on a tmpfs with a number of inodes that only a process
//! with the right to mount can create, because an image with a symbolic link lets the runtime mount
//! a volume's files here (`docs/adr/0056-authenticate-grants-by-tmpfs.md`). A grant that is invalid
//! in any detail is ignored, so its memory is not available.

use core::ffi::{CStr, c_int};

use tessera_intercept_abi::{
    ABI_VERSION, GRANT_LEN, GRANTS_TMPFS_INODES, Grant, LEDGER_LEN, LEDGER_TMPFS_INODES,
    LedgerPage, PublishedPage, ledger,
};

use crate::sys::{self, Fd, HERE, Map};
use crate::trace;

const DIRECTORY: &CStr = c"/dev/tessera";

/// Length of the longest id with its NUL.
pub(crate) const NAME_ROOM: usize = 129;

/// Returns true if the container has the directory of grants, which only the driver creates. Its
/// grants may be invalid.
#[cfg(feature = "hami")]
pub(crate) fn has_directory() -> bool {
    sys::status(HERE, DIRECTORY, 0).is_some()
}

/// A grant and its ledger, mapped.
pub(crate) struct FoundGrant<'a> {
    /// Name of its directory.
    pub(crate) name: &'a CStr,
    /// The grant as it is mapped.
    pub(crate) page: *const u8,
    /// The grant as it was read.
    pub(crate) grant: Grant,
    pub(crate) ledger: &'static LedgerPage,
    /// Device and inode of the ledger.
    pub(crate) identity: (u64, u64),
}

/// Calls `found` with every valid grant of the container.
pub(crate) fn discover(mut found: impl FnMut(FoundGrant<'_>)) {
    let flags = libc::O_RDONLY | libc::O_DIRECTORY;
    let Some(directory) = Fd::open_at(HERE, DIRECTORY, flags) else { return };
    let mut entries = [0_u8; 4096];
    loop {
        let filled = directory.entries(&mut entries);
        if filled == 0 {
            return;
        }
        let mut rest = entries.get(..filled).unwrap_or_default();
        while let Some((name, next)) = next_entry(rest) {
            rest = next;
            if !matches!(name.to_bytes(), b"." | b"..")
                && let Some(grant) = open_grant(directory.raw(), name)
            {
                found(grant);
            }
        }
    }
}

/// Returns the name of the first entry of `linux_dirent64`s, and the rest.
fn next_entry(entries: &[u8]) -> Option<(&CStr, &[u8])> {
    /// Inode, offset, length, type.
    const LENGTH_AT: usize = 16;
    const NAME_AT: usize = 19;
    let length = u16::from_ne_bytes(*entries.get(LENGTH_AT..)?.first_chunk()?).into();
    let (entry, rest) = entries.split_at_checked(length)?;
    Some((CStr::from_bytes_until_nul(entry.get(NAME_AT..)?).ok()?, rest))
}

fn open_grant(directory: c_int, name: &CStr) -> Option<FoundGrant<'_>> {
    let own = Fd::open_at(directory, name, libc::O_PATH | libc::O_DIRECTORY)?;
    let grant_file = Fd::open_at(own.raw(), c"grant", libc::O_RDONLY)?;
    let status = grant_file.status()?;
    let file_system = grant_file.file_system()?;
    let genuine = status.regular
        && status.mount_root
        && file_system.read_only
        && file_system.tmpfs_inodes == Some(GRANTS_TMPFS_INODES);
    if !genuine || status.length != GRANT_LEN as u64 {
        let reason = if status.reports_mount_root {
            "it was not mounted by the driver"
        } else {
            "the kernel is older than 5.8 and does not report mount points"
        };
        return trace::ignored_grant(name, reason);
    }
    let page = sys::map(Map::Read(&grant_file), GRANT_LEN)?;
    let Some(grant) = read_stable(page.cast()) else {
        // SAFETY: just mapped; no reference to it exists.
        unsafe { sys::unmap(page, GRANT_LEN) };
        return trace::ignored_grant(name, "it is corrupt, or of an unknown version");
    };
    // Its directory must be its id: a grant that is mounted twice counts once.
    let ledger =
        (grant.id.as_str().as_bytes() == name.to_bytes()).then(|| open_ledger(own.raw())).flatten();
    let Some((ledger, identity)) = ledger else {
        // SAFETY: as above.
        unsafe { sys::unmap(page, GRANT_LEN) };
        return trace::ignored_grant(name, "its ledger is not the driver's");
    };
    Some(FoundGrant { name, page: page.cast(), grant, ledger, identity })
}

fn open_ledger(directory: c_int) -> Option<(&'static LedgerPage, (u64, u64))> {
    let file = Fd::open_at(directory, c"ledger", libc::O_RDWR)?;
    let status = file.status()?;
    let genuine = status.regular
        && status.mount_root
        && file.file_system()?.tmpfs_inodes == Some(LEDGER_TMPFS_INODES);
    if genuine { map_ledger(&file) } else { None }
}

/// Maps a file as a ledger if it is one. Returns the mapping and the file's identity.
pub(crate) fn map_ledger(file: &Fd) -> Option<(&'static LedgerPage, (u64, u64))> {
    let status = file.status()?;
    if !status.regular || status.length != LEDGER_LEN as u64 {
        return None;
    }
    let at = sys::map(Map::Shared(file), LEDGER_LEN)?;
    // SAFETY: a mapping of that length that is never unmapped while it counts; every bit pattern is
    // valid for atomics and integers. (A tenant can truncate its ledger: then its own processes
    // get SIGBUS.)
    let page: &'static LedgerPage = unsafe { &*at.cast::<LedgerPage>() };
    let order = core::sync::atomic::Ordering::Relaxed;
    let is_ledger = page.magic.load(order) == ledger::MAGIC
        && page.abi_version.load(order) == ABI_VERSION
        && page.length.load(order) as usize == LEDGER_LEN
        && page.slots.load(order) as usize == ledger::SLOTS
        && page.slot_length.load(order) as usize == ledger::SLOT_LEN;
    if !is_ledger {
        // SAFETY: just mapped; the reference is not used again.
        unsafe { sys::unmap(at, LEDGER_LEN) };
        return None;
    }
    Some((page, status.identity))
}

/// Opens a ledger again for locks, if it is still the same file.
pub(crate) fn reopen_ledger(name: &CStr, identity: (u64, u64)) -> Option<Fd> {
    #[cfg(feature = "hami")]
    if let Some(file) = crate::hami::reopen_ledger(name) {
        return (file.status()?.identity == identity).then_some(file);
    }
    let all = Fd::open_at(HERE, DIRECTORY, libc::O_PATH | libc::O_DIRECTORY)?;
    let own = Fd::open_at(all.raw(), name, libc::O_PATH | libc::O_DIRECTORY)?;
    let file = Fd::open_at(own.raw(), c"ledger", libc::O_RDWR)?;
    (file.status()?.identity == identity).then_some(file)
}

/// Reads a grant that the host may be writing. `None` if it stays half written, or is invalid.
pub(crate) fn read_stable(page: *const u8) -> Option<Grant> {
    /// A change takes three writes of the host; these are some milliseconds.
    const TRIES: usize = 10_000;
    let mut copy = [0_u8; GRANT_LEN];
    for _ in 0..TRIES {
        let before = sequence(page);
        for (at, byte) in copy.iter_mut().enumerate() {
            // SAFETY: the mapping has that length; volatile, since the host may be writing.
            *byte = unsafe { page.add(at).read_volatile() };
        }
        core::sync::atomic::fence(core::sync::atomic::Ordering::Acquire);
        if before.is_multiple_of(2) && sequence(page) == before {
            return Grant::parse(&copy).ok();
        }
        core::hint::spin_loop();
    }
    None
}

/// Returns the sequence number of a grant's page.
pub(crate) fn sequence(page: *const u8) -> u64 {
    let at = page
        .wrapping_add(tessera_intercept_abi::grant_offset::SEQUENCE)
        .cast::<core::sync::atomic::AtomicU64>();
    // SAFETY: an aligned word in a mapping of a grant's length that is never unmapped while it
    // counts.
    unsafe { &*at }.load(core::sync::atomic::Ordering::Acquire)
}

/// Returns the values that the host publishes in a grant's page.
pub(crate) fn published(page: *const u8) -> &'static PublishedPage {
    let at =
        page.wrapping_add(tessera_intercept_abi::grant_offset::PUBLISHED).cast::<PublishedPage>();
    // SAFETY: aligned words in a mapping of a grant's length that is never unmapped while it
    // counts.
    unsafe { &*at }
}
