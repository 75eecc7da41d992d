//! The mapped usage file: layout, locks, and liveness of processes.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::world::MAX_GPUS;

/// Maximum number of processes with memory: ten times what a node runs.
pub(super) const SLOTS: usize = 1024;
/// Maximum number of exported allocations of a process, and of opened ones.
pub(super) const SHARED: usize = 64;
const MAGIC: u64 = 0x5445_5353_4641_4b45; // "TESSFAKE"
const VERSION: u32 = 3;
const PAGE: usize = 4096;

/// Usage of one process. All fields are atomics, so that zeroes are a valid, empty slot.
#[repr(C)]
pub(super) struct Slot {
    pub(super) pid: AtomicU32,
    unused: AtomicU32,
    pub(super) namespace: AtomicU64,
    name: [AtomicU64; 2],
    pub(super) bytes: [AtomicU64; MAX_GPUS],
    /// Length of all kernels so far, ns.
    pub(super) kernels_ns: [AtomicU64; MAX_GPUS],
    /// Monotonic time in ns at which the last of them ends.
    pub(super) busy_until_ns: [AtomicU64; MAX_GPUS],
    /// Number of processes that have owned the slot.
    pub(super) owners: AtomicU64,
    /// Addresses of its memory that other processes may open; 0: none.
    pub(super) exported: [AtomicU64; SHARED],
    /// Memory of other processes that it has open.
    pub(super) opened: [OpenedMemory; SHARED],
}

/// Memory that one process has opened of another.
#[repr(C)]
pub(super) struct OpenedMemory {
    /// Slot of the process that has exported it, + 1; 0: no entry.
    pub(super) slot: AtomicU64,
    /// `owners` of that slot then.
    pub(super) owner: AtomicU64,
    /// Its address there.
    pub(super) address: AtomicU64,
    pub(super) gpu: AtomicU64,
    pub(super) bytes: AtomicU64,
}

impl Slot {
    /// Sets the name. The kernel's `comm` has at most 15 bytes, which fit.
    pub(super) fn set_name(&self, name: &str) {
        let mut padded = [0; 16];
        let length = name.len().min(15);
        padded[..length].copy_from_slice(&name.as_bytes()[..length]);
        for (word, bytes) in self.name.iter().zip(padded.chunks_exact(8)) {
            let bytes = bytes.try_into().expect("invariant: chunks of eight");
            word.store(u64::from_ne_bytes(bytes), Ordering::Relaxed);
        }
    }

    pub(super) fn name(&self) -> String {
        let bytes: Vec<u8> =
            self.name.iter().flat_map(|word| word.load(Ordering::Relaxed).to_ne_bytes()).collect();
        let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
        String::from_utf8_lossy(&bytes[..end]).into_owned()
    }
}

#[repr(C)]
struct Table {
    magic: u64,
    version: u32,
    high_water: AtomicU32,
    fingerprint: u64,
    slots: [Slot; SLOTS],
}

/// The mapped usage file.
#[derive(Debug)]
pub(super) struct Region {
    /// Path, which is opened for every lock: an OFD lock belongs to its open file description.
    path: PathBuf,
    /// File for queries of locks, never for holding one.
    file: File,
    table: NonNull<Table>,
    /// A page that reads as zero after a fork (`MADV_WIPEONFORK`); 1: the claim belongs to this
    /// process.
    owned: NonNull<AtomicU32>,
}

// SAFETY: the mappings live as long as the region, and the table is only written through atomics
// after it has become visible to others.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Opens the file and creates it if it does not exist.
    pub(super) fn open(path: &Path, fingerprint: u64) -> io::Result<Self> {
        let open = || OpenOptions::new().read(true).write(true).open(path);
        let file = match open() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                create(path, fingerprint)?;
                open()?
            }
            other => other?,
        };
        Self::map(path.to_owned(), file)
    }

    /// Returns a region that only this process and its forked children see.
    pub(super) fn in_memory(fingerprint: u64) -> io::Result<Self> {
        // SAFETY: the name is constant and terminated; the result is checked.
        let fd = unsafe { libc::memfd_create(c"tessera-fake-usage".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor is new and has no other owner.
        let file = unsafe { File::from_raw_fd(fd) };
        fill(&file, fingerprint)?;
        Self::map(PathBuf::from(format!("/proc/self/fd/{fd}")), file)
    }

    fn map(path: PathBuf, file: File) -> io::Result<Self> {
        // Accesses beyond a shorter file would cause SIGBUS.
        if file.metadata()?.len() < size_of::<Table>() as u64 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "file is too short"));
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let table = map_pages(size_of::<Table>(), protection, libc::MAP_SHARED, file.as_raw_fd())?;
        let owned = map_pages(PAGE, protection, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)?;
        advise(owned, libc::MADV_WIPEONFORK)?;
        Ok(Self { path, file, table: table.cast(), owned: owned.cast() })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    fn table(&self) -> &Table {
        // SAFETY: mapped while the region lives, long enough and page-aligned. Plain fields were
        // written before the file became visible; all others are atomics.
        unsafe { self.table.as_ref() }
    }

    fn owned(&self) -> &AtomicU32 {
        // SAFETY: mapped while the region lives and page-aligned; zero is a valid value.
        unsafe { self.owned.as_ref() }
    }

    pub(super) fn matches(&self, fingerprint: u64) -> bool {
        let table = self.table();
        (table.magic, table.version, table.fingerprint) == (MAGIC, VERSION, fingerprint)
    }

    pub(super) fn slots(&self) -> &[Slot; SLOTS] {
        &self.table().slots
    }

    /// Returns the slots up to the highest that was ever claimed.
    pub(super) fn used_slots(&self) -> &[Slot] {
        let used = self.table().high_water.load(Ordering::SeqCst) as usize;
        &self.slots()[..used.min(SLOTS)]
    }

    /// Returns true if no slot is claimed, or if a parent process claimed it.
    pub(super) fn was_forked(&self) -> bool {
        self.owned().load(Ordering::Relaxed) == 0
    }

    /// Marks the claim as this process's own.
    pub(super) fn set_owned(&self) {
        self.owned().store(1, Ordering::Relaxed);
    }

    /// Returns true if a slot's owner is alive.
    pub(super) fn is_alive(&self, slot: usize) -> bool {
        let mut lock = byte_lock(slot);
        // SAFETY: the descriptor is open and the `flock` complete; the kernel only writes into the
        // latter.
        let result = unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_OFD_GETLK, &mut lock) };
        // If the query fails, the process is assumed to be alive.
        result != 0 || i32::from(lock.l_type) != libc::F_UNLCK
    }

    /// Claims a slot without living owner, clears it, records this process. Returns `None` if it
    /// has an owner.
    pub(super) fn claim(&self, slot: usize) -> io::Result<Option<Claim>> {
        let file = OpenOptions::new().read(true).write(true).open(&self.path)?;
        let lock = byte_lock(slot);
        // SAFETY: the descriptor is open and the `flock` complete.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock) } != 0 {
            return Ok(None);
        }
        let mapping = map_pages(PAGE, libc::PROT_NONE, libc::MAP_SHARED, file.as_raw_fd())?;
        advise(mapping, libc::MADV_DONTFORK)?;
        let entry = &self.slots()[slot];
        for word in entry.bytes.iter().chain(&entry.kernels_ns).chain(&entry.busy_until_ns) {
            word.store(0, Ordering::SeqCst);
        }
        entry.forget_shared_memory();
        entry.owners.fetch_add(1, Ordering::SeqCst);
        entry.describe_this_process();
        self.table().high_water.fetch_max(slot as u32 + 1, Ordering::SeqCst);
        Ok(Some(Claim { slot, mapping: Some(mapping) }))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        unmap(self.table.cast(), size_of::<Table>());
        unmap(self.owned.cast(), PAGE);
    }
}

/// A claimed slot.
///
/// The lock is on an open file description that only a mapping keeps open: an inaccessible page
/// that fork does not inherit. The lock therefore lives exactly as long as this process's address
/// space. Exit, kill -9 and exec end it, and a forked child does not prolong it, as it would with a
/// descriptor.
#[derive(Debug)]
pub(super) struct Claim {
    slot: usize,
    mapping: Option<NonNull<libc::c_void>>,
}

// SAFETY: the address is only unmapped, once.
unsafe impl Send for Claim {}

impl Claim {
    pub(super) fn slot(&self) -> usize {
        self.slot
    }

    /// Forgets the claim in a forked child, where the mapping does not exist and its address may be
    /// reused.
    pub(super) fn abandon(mut self) {
        self.mapping = None;
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(mapping) = self.mapping {
            unmap(mapping, PAGE);
        }
    }
}

/// Returns true if this process may create files in a directory.
pub(super) fn is_writable(directory: &Path) -> bool {
    let Ok(path) = CString::new(directory.as_os_str().as_bytes()) else { return false };
    // SAFETY: the string is terminated and outlives the call.
    unsafe { libc::access(path.as_ptr(), libc::W_OK | libc::X_OK) == 0 }
}

/// Creates the complete file under another name and links it into place, so that no process sees a
/// partial one. The second creator uses the file of the first.
fn create(path: &Path, fingerprint: u64) -> io::Result<()> {
    let (temporary, file) = create_unique(path)?;
    let linked =
        complete(&file, fingerprint).and_then(|()| match fs::hard_link(&temporary, path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            _ => Ok(()),
        });
    fs::remove_file(&temporary)?;
    linked
}

/// Creates a new file beside `path`. PIDs are not unique: every container has a process 1, and both
/// fake libraries may start at the same time in one process.
fn create_unique(path: &Path) -> io::Result<(PathBuf, File)> {
    let mut attempt = 0_u32;
    loop {
        let temporary = path.with_extension(format!("new-{attempt}"));
        match OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o666)
            .open(&temporary)
        {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && attempt < 10_000 => {
                attempt += 1
            }
            other => return other.map(|file| (temporary, file)),
        }
    }
}

fn complete(file: &File, fingerprint: u64) -> io::Result<()> {
    // Containers run as any user; the umask must not restrict them.
    file.set_permissions(fs::Permissions::from_mode(0o666))?;
    fill(file, fingerprint)
}

fn fill(file: &File, fingerprint: u64) -> io::Result<()> {
    use std::os::unix::fs::FileExt as _;
    file.set_len(size_of::<Table>() as u64)?;
    let mut header = Vec::with_capacity(24);
    header.extend_from_slice(&MAGIC.to_ne_bytes());
    header.extend_from_slice(&VERSION.to_ne_bytes());
    header.extend_from_slice(&0_u32.to_ne_bytes());
    header.extend_from_slice(&fingerprint.to_ne_bytes());
    file.write_all_at(&header, 0)
}

fn byte_lock(slot: usize) -> libc::flock {
    // SAFETY: `flock` is plain data; zeroes are valid, and `l_pid` must be 0 for OFD locks.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::F_WRLCK as libc::c_short;
    lock.l_whence = libc::SEEK_SET as libc::c_short;
    lock.l_start = slot as libc::off_t;
    lock.l_len = 1;
    lock
}

fn map_pages(
    length: usize,
    protection: i32,
    flags: i32,
    fd: i32,
) -> io::Result<NonNull<libc::c_void>> {
    // SAFETY: a new mapping at an address of the kernel's choice does not change existing memory.
    let address = unsafe { libc::mmap(ptr::null_mut(), length, protection, flags, fd, 0) };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(address).ok_or_else(|| io::Error::other("mapped at address 0"))
}

fn advise(page: NonNull<libc::c_void>, advice: i32) -> io::Result<()> {
    // SAFETY: the page was just mapped; the advice only affects fork.
    if unsafe { libc::madvise(page.as_ptr(), PAGE, advice) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn unmap(address: NonNull<libc::c_void>, length: usize) {
    // SAFETY: mapped by `map_pages` with that length, unmapped once, and no longer
    // referenced.
    unsafe { libc::munmap(address.as_ptr(), length) };
}

const _: () = assert!(size_of::<Slot>() == 40 + 24 * MAX_GPUS + 48 * SHARED);
const _: () = assert!(std::mem::offset_of!(Table, slots) == 24);
