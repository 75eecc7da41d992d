//! The mapped file: layout, locks, and who is alive.

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

/// Processes that can hold memory at a time: an order of magnitude above what a node runs.
pub(super) const SLOTS: usize = 1024;
const MAGIC: u64 = 0x5445_5353_4641_4b45; // "TESSFAKE"
const VERSION: u32 = 1;
const PAGE: usize = 4096;

/// One process's use. All fields are atomics, so zeroes are a valid, empty slot.
#[repr(C)]
pub(super) struct Slot {
    pub(super) pid: AtomicU32,
    unused: AtomicU32,
    pub(super) namespace: AtomicU64,
    name: [AtomicU64; 2],
    pub(super) bytes: [AtomicU64; MAX_GPUS],
}

impl Slot {
    /// The kernel's `comm` has at most 15 bytes; they fit.
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
    /// Reopened for every lock: an OFD lock belongs to its open file description.
    path: PathBuf,
    /// For asking about locks, never for holding one.
    file: File,
    table: NonNull<Table>,
    /// A page that reads as zero after a fork (`MADV_WIPEONFORK`): 1 = this process's claim is its
    /// own.
    owned: NonNull<AtomicU32>,
}

// SAFETY: the mappings live as long as the region; the table is written through atomics only once
// it is visible to others.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Opens the file, making it first where it does not exist.
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

    /// A region that no other process sees (but children made by fork).
    pub(super) fn in_memory(fingerprint: u64) -> io::Result<Self> {
        // SAFETY: a constant, terminated name; the result is checked.
        let fd = unsafe { libc::memfd_create(c"tessera-fake-usage".as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a descriptor that was just made and that nobody else owns.
        let file = unsafe { File::from_raw_fd(fd) };
        fill(&file, fingerprint)?;
        Self::map(PathBuf::from(format!("/proc/self/fd/{fd}")), file)
    }

    fn map(path: PathBuf, file: File) -> io::Result<Self> {
        // A shorter file would end in SIGBUS.
        if file.metadata()?.len() < size_of::<Table>() as u64 {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "the file is too short"));
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
        // SAFETY: mapped for the region's life, long enough, page-aligned; plain fields were
        // written before the file became visible, all others are atomics.
        unsafe { self.table.as_ref() }
    }

    fn owned(&self) -> &AtomicU32 {
        // SAFETY: mapped for the region's life, page-aligned, zero is a valid value.
        unsafe { self.owned.as_ref() }
    }

    pub(super) fn matches(&self, fingerprint: u64) -> bool {
        let table = self.table();
        (table.magic, table.version, table.fingerprint) == (MAGIC, VERSION, fingerprint)
    }

    pub(super) fn slots(&self) -> &[Slot; SLOTS] {
        &self.table().slots
    }

    /// The slots up to the highest that was ever claimed.
    pub(super) fn used_slots(&self) -> &[Slot] {
        let used = self.table().high_water.load(Ordering::SeqCst) as usize;
        &self.slots()[..used.min(SLOTS)]
    }

    /// Whether a claim made through this region is a parent's and not this process's.
    pub(super) fn was_forked(&self) -> bool {
        self.owned().load(Ordering::Relaxed) == 0
    }

    /// Says that the current claim is this process's own.
    pub(super) fn set_owned(&self) {
        self.owned().store(1, Ordering::Relaxed);
    }

    /// Whether a slot's owner lives.
    pub(super) fn is_alive(&self, slot: usize) -> bool {
        let mut lock = byte_lock(slot);
        // SAFETY: an open descriptor and a complete `flock`; the kernel only writes into the
        // latter.
        let asked = unsafe { libc::fcntl(self.file.as_raw_fd(), libc::F_OFD_GETLK, &mut lock) };
        // When the kernel does not say, nobody is declared dead.
        asked != 0 || i32::from(lock.l_type) != libc::F_UNLCK
    }

    /// Takes a slot that nobody living owns, empties it, and enters this process. `None` if it has
    /// an owner.
    pub(super) fn claim(&self, slot: usize) -> io::Result<Option<Claim>> {
        let file = OpenOptions::new().read(true).write(true).open(&self.path)?;
        let lock = byte_lock(slot);
        // SAFETY: an open descriptor and a complete `flock`.
        if unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &lock) } != 0 {
            return Ok(None);
        }
        let held = map_pages(PAGE, libc::PROT_NONE, libc::MAP_SHARED, file.as_raw_fd())?;
        advise(held, libc::MADV_DONTFORK)?;
        let entry = &self.slots()[slot];
        for bytes in &entry.bytes {
            bytes.store(0, Ordering::SeqCst);
        }
        entry.describe_this_process();
        self.table().high_water.fetch_max(slot as u32 + 1, Ordering::SeqCst);
        Ok(Some(Claim { slot, held: Some(held) }))
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        unmap(self.table.cast(), size_of::<Table>());
        unmap(self.owned.cast(), PAGE);
    }
}

/// A held slot.
///
/// The lock is on an open file description that only a mapping keeps alive: an inaccessible page
/// that is not inherited by fork. So the lock lives exactly as long as this process's address
/// space: exit, kill -9 and exec all end it, and a forked child does not prolong it, as it would
/// with a descriptor.
#[derive(Debug)]
pub(super) struct Claim {
    slot: usize,
    held: Option<NonNull<libc::c_void>>,
}

// SAFETY: the address is only ever unmapped, once.
unsafe impl Send for Claim {}

impl Claim {
    pub(super) fn slot(&self) -> usize {
        self.slot
    }

    /// For a child after fork: the mapping is the parent's and does not exist here; the address may
    /// be something else now.
    pub(super) fn forget(mut self) {
        self.held = None;
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Some(held) = self.held {
            unmap(held, PAGE);
        }
    }
}

/// Whether this process may make files in a directory.
pub(super) fn is_writable(directory: &Path) -> bool {
    let Ok(path) = CString::new(directory.as_os_str().as_bytes()) else { return false };
    // SAFETY: a terminated string that outlives the call.
    unsafe { libc::access(path.as_ptr(), libc::W_OK | libc::X_OK) == 0 }
}

/// Makes the file complete under another name and links it into place, so that nobody sees half of
/// it; who comes second uses the first one's.
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

/// A new file beside `path`. Process ids are no help: every container has a process 1, and both
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
    // Containers run as any user; the umask must not shut them out.
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
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let address = unsafe { libc::mmap(ptr::null_mut(), length, protection, flags, fd, 0) };
    if address == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    NonNull::new(address).ok_or_else(|| io::Error::other("mapped at address 0"))
}

fn advise(page: NonNull<libc::c_void>, advice: i32) -> io::Result<()> {
    // SAFETY: a page that was just mapped; the advice only concerns fork.
    if unsafe { libc::madvise(page.as_ptr(), PAGE, advice) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn unmap(address: NonNull<libc::c_void>, length: usize) {
    // SAFETY: mapped by `map_pages` with that length, unmapped once, and nothing refers to it any
    // more.
    unsafe { libc::munmap(address.as_ptr(), length) };
}

const _: () = assert!(size_of::<Slot>() == 32 + 8 * MAX_GPUS);
const _: () = assert!(std::mem::offset_of!(Table, slots) == 24);
