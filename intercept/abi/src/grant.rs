//! Grant: the part of one GPU that a container may use.

use core::fmt;
use core::mem::{offset_of, size_of};

use crate::{ABI_VERSION, GRANT_LEN, GpuUuid, MAX_MEMORY_BYTES, PublishedPage, Text, TextError};

/// `TESGRANT` in the first eight bytes of the file.
const MAGIC: u64 = u64::from_le_bytes(*b"TESGRANT");

/// Bit of `flags`: plain memory of this GPU is managed, so that the driver may move it to the host,
/// and the limit may be beyond what the GPU has.
pub const GRANT_OVERSUBSCRIBE: u64 = 1;

/// Bit of `flags`: processes are to share this GPU by MPS, which holds their part of its compute.
/// Who is no client of it, as [`mps`](crate::mps) says, is held as in any other grant.
pub const GRANT_MPS: u64 = 2;

/// The bits of `flags` that this version knows.
const KNOWN_FLAGS: u64 = GRANT_OVERSUBSCRIBE | GRANT_MPS;

/// The grant file, byte for byte. Code handles [`Grant`]; this is its layout and the proof of it.
#[repr(C)]
#[derive(Debug)]
pub struct GrantPage {
    /// `TESGRANT`.
    pub magic: u64,
    /// [`ABI_VERSION`].
    pub abi_version: u32,
    /// [`GRANT_LEN`].
    pub length: u32,
    /// Even: stable. Odd: the host is changing what follows. Goes up by two with every change.
    pub sequence: u64,
    /// Bytes of GPU memory; never more than [`MAX_MEMORY_BYTES`].
    pub memory_limit_bytes: u64,
    /// Bytes charged for each CUDA context on this GPU; 0 charges nothing.
    pub context_bytes: u64,
    /// Percent of the GPU's compute, 0 to 100; 0 = best effort.
    pub cores_percent: u32,
    /// [`ComputePolicy`] as a number.
    pub policy: u32,
    /// Bits of features that must be understood: an unknown bit refuses the grant.
    /// [`GRANT_OVERSUBSCRIBE`], [`GRANT_MPS`].
    pub flags: u64,
    /// The GPU.
    pub gpu_uuid: [u8; 16],
    /// UID of the claim, NUL padded.
    pub claim_uid: [u8; 64],
    /// Name of the share, which is its directory under `/dev/tessera`, NUL padded.
    pub id: [u8; 128],
    /// Zero; room to grow.
    pub reserved: [u8; GrantPage::PUBLISHED - GrantPage::USED],
    /// Values that the host publishes several times a second. `sequence` does not count these
    /// writes. They have a cache line of their own, so that readers of the rest are not slowed
    /// down.
    pub published: PublishedPage,
    reserved1: [u8; GRANT_LEN - GrantPage::PUBLISHED - size_of::<PublishedPage>()],
}

impl GrantPage {
    const USED: usize = 264;
    const PUBLISHED: usize = 4032;
}

/// Offsets of the fields of the grant file.
pub mod grant_offset {
    use super::{GrantPage, offset_of};

    /// Offset of `magic`.
    pub const MAGIC: usize = offset_of!(GrantPage, magic);
    /// Offset of `abi_version`.
    pub const ABI_VERSION: usize = offset_of!(GrantPage, abi_version);
    /// Offset of `length`.
    pub const LENGTH: usize = offset_of!(GrantPage, length);
    /// Offset of `sequence`.
    pub const SEQUENCE: usize = offset_of!(GrantPage, sequence);
    /// Offset of `memory_limit_bytes`, the first byte that a change may write.
    pub const MEMORY_LIMIT_BYTES: usize = offset_of!(GrantPage, memory_limit_bytes);
    /// Offset of `context_bytes`.
    pub const CONTEXT_BYTES: usize = offset_of!(GrantPage, context_bytes);
    /// Offset of `cores_percent`.
    pub const CORES_PERCENT: usize = offset_of!(GrantPage, cores_percent);
    /// Offset of `policy`.
    pub const POLICY: usize = offset_of!(GrantPage, policy);
    /// Offset of `flags`.
    pub const FLAGS: usize = offset_of!(GrantPage, flags);
    /// Offset of `gpu_uuid`.
    pub const GPU_UUID: usize = offset_of!(GrantPage, gpu_uuid);
    /// Offset of `claim_uid`.
    pub const CLAIM_UID: usize = offset_of!(GrantPage, claim_uid);
    /// Offset of `id`.
    pub const ID: usize = offset_of!(GrantPage, id);
    /// Offset of `reserved`.
    pub const RESERVED: usize = offset_of!(GrantPage, reserved);
    /// Offset of `published`.
    pub const PUBLISHED: usize = offset_of!(GrantPage, published);
}

const _: () = {
    assert!(size_of::<GrantPage>() == GRANT_LEN);
    assert!(grant_offset::MAGIC == 0);
    assert!(grant_offset::ABI_VERSION == 8);
    assert!(grant_offset::LENGTH == 12);
    assert!(grant_offset::SEQUENCE == 16);
    assert!(grant_offset::MEMORY_LIMIT_BYTES == 24);
    assert!(grant_offset::CONTEXT_BYTES == 32);
    assert!(grant_offset::CORES_PERCENT == 40);
    assert!(grant_offset::POLICY == 44);
    assert!(grant_offset::FLAGS == 48);
    assert!(grant_offset::GPU_UUID == 56);
    assert!(grant_offset::CLAIM_UID == 72);
    assert!(grant_offset::ID == 136);
    assert!(grant_offset::RESERVED == 264);
    assert!(grant_offset::PUBLISHED == 4032);
    assert!(offset_of!(PublishedPage, word) == 0);
    assert!(offset_of!(PublishedPage, others_busy_ns) == 8);
    assert!(offset_of!(PublishedPage, gain) == 16);
    assert!(offset_of!(PublishedPage, overhead_bytes) == 24);
    assert!(offset_of!(PublishedPage, unmetered_gpu_ns) == 32);
    assert!(offset_of!(PublishedPage, scale) == 40);
};

/// Enforcement of the compute share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[repr(u32)]
pub enum ComputePolicy {
    /// No cap.
    #[default]
    None = 0,
    /// Hard cap at the grant's percent.
    Fixed = 1,
    /// Cap only while others need the GPU.
    Balance = 2,
}

/// Part of one GPU that a container may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Grant {
    /// The GPU.
    pub gpu_uuid: GpuUuid,
    /// Bytes of GPU memory; at most [`MAX_MEMORY_BYTES`].
    pub memory_limit_bytes: u64,
    /// Bytes charged for each CUDA context on this GPU; 0 charges nothing.
    pub context_bytes: u64,
    /// Percent of the GPU's compute, 0 to 100; 0 = best effort.
    pub cores_percent: u32,
    /// Enforcement of the compute share.
    pub policy: ComputePolicy,
    /// True if memory may spill to the host, [`GRANT_OVERSUBSCRIBE`].
    pub oversubscribe: bool,
    /// True if processes share the GPU through MPS, [`GRANT_MPS`].
    pub mps: bool,
    /// UID of the claim.
    pub claim_uid: Text<64>,
    /// Name of the share: its directory under `/dev/tessera`, the CDI device's name.
    pub id: Text<128>,
    /// Number of changes in place, times two. A new grant has 0.
    pub sequence: u64,
}

/// Error in the values or in the bytes of a grant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum GrantError {
    /// The file, or its field `length`, is not [`GRANT_LEN`] bytes.
    Length {
        /// Bytes found.
        found: usize,
    },
    /// It does not begin with the magic number: it is no grant.
    Magic,
    /// It was written by another version of Tessera.
    AbiVersion {
        /// The version in the file.
        found: u32,
    },
    /// The host is changing it now: read again.
    Changing,
    /// A limit above [`MAX_MEMORY_BYTES`].
    MemoryLimit {
        /// Bytes requested.
        bytes: u64,
    },
    /// Percent above 100.
    CoresPercent {
        /// Percent requested.
        percent: u32,
    },
    /// A policy this version does not know.
    Policy {
        /// Its number.
        found: u32,
    },
    /// Feature bits this version does not know.
    Flags {
        /// All bits.
        found: u64,
    },
    /// `claim_uid` is no identifier.
    ClaimUid(TextError),
    /// `id` is no identifier.
    Id(TextError),
    /// A change in place must keep GPU, claim and id: another share needs a grant of its own.
    Identity,
}

impl fmt::Display for GrantError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length { found } => write!(f, "grant has {found} bytes, not {GRANT_LEN}"),
            Self::Magic => f.write_str("not a grant: it does not begin with TESGRANT"),
            Self::AbiVersion { found } => {
                write!(
                    f,
                    "grant has ABI version {found}, this program speaks {ABI_VERSION}: use driver and library of one release"
                )
            }
            Self::Changing => f.write_str("grant is being changed: read it again"),
            Self::MemoryLimit { bytes } => {
                write!(
                    f,
                    "memory limit of {bytes} bytes is above the most a grant carries, {MAX_MEMORY_BYTES}"
                )
            }
            Self::CoresPercent { percent } => write!(f, "cores of {percent} percent are above 100"),
            Self::Policy { found } => {
                write!(f, "compute policy {found} is not known to this version")
            }
            Self::Flags { found } => {
                write!(f, "feature bits {found:#x} are not known to this version")
            }
            Self::ClaimUid(_) => f.write_str("claim UID is no identifier"),
            Self::Id(_) => f.write_str("share id is no identifier"),
            Self::Identity => {
                f.write_str("a grant changed in place must keep its GPU, claim and id")
            }
        }
    }
}

impl core::error::Error for GrantError {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        match self {
            Self::ClaimUid(source) | Self::Id(source) => Some(source),
            _ => None,
        }
    }
}

impl Grant {
    /// Returns the bytes of the grant's file.
    ///
    /// # Errors
    /// The limit or the percent is out of range.
    pub fn encode(&self) -> Result<[u8; GRANT_LEN], GrantError> {
        self.check()?;
        let mut page = [0; GRANT_LEN];
        put(&mut page, grant_offset::MAGIC, &MAGIC.to_le_bytes());
        put(&mut page, grant_offset::ABI_VERSION, &ABI_VERSION.to_le_bytes());
        put(&mut page, grant_offset::LENGTH, &(GRANT_LEN as u32).to_le_bytes());
        put(&mut page, grant_offset::SEQUENCE, &(self.sequence & !1).to_le_bytes());
        put(&mut page, grant_offset::MEMORY_LIMIT_BYTES, &self.memory_limit_bytes.to_le_bytes());
        put(&mut page, grant_offset::CONTEXT_BYTES, &self.context_bytes.to_le_bytes());
        put(&mut page, grant_offset::CORES_PERCENT, &self.cores_percent.to_le_bytes());
        put(&mut page, grant_offset::POLICY, &(self.policy as u32).to_le_bytes());
        put(&mut page, grant_offset::FLAGS, &self.flags().to_le_bytes());
        put(&mut page, grant_offset::GPU_UUID, &self.gpu_uuid.0);
        put(&mut page, grant_offset::CLAIM_UID, self.claim_uid.padded());
        put(&mut page, grant_offset::ID, self.id.padded());
        Ok(page)
    }

    /// Parses the bytes of a grant's file. A grant with an unknown value is refused: no grant means
    /// no memory.
    ///
    /// # Errors
    /// Returns the first error. Only [`GrantError::Changing`] is temporary.
    pub fn parse(page: &[u8]) -> Result<Self, GrantError> {
        let page: &[u8; GRANT_LEN] =
            page.try_into().map_err(|_| GrantError::Length { found: page.len() })?;
        if word(page, grant_offset::MAGIC) != MAGIC {
            return Err(GrantError::Magic);
        }
        let found = half(page, grant_offset::ABI_VERSION);
        if found != ABI_VERSION {
            return Err(GrantError::AbiVersion { found });
        }
        let length = half(page, grant_offset::LENGTH) as usize;
        if length != GRANT_LEN {
            return Err(GrantError::Length { found: length });
        }
        let sequence = word(page, grant_offset::SEQUENCE);
        if sequence % 2 == 1 {
            return Err(GrantError::Changing);
        }
        let flags = word(page, grant_offset::FLAGS);
        if flags & !KNOWN_FLAGS != 0 {
            return Err(GrantError::Flags { found: flags });
        }
        let policy = match half(page, grant_offset::POLICY) {
            0 => ComputePolicy::None,
            1 => ComputePolicy::Fixed,
            2 => ComputePolicy::Balance,
            found => return Err(GrantError::Policy { found }),
        };
        let grant = Self {
            gpu_uuid: GpuUuid(take(page, grant_offset::GPU_UUID)),
            memory_limit_bytes: word(page, grant_offset::MEMORY_LIMIT_BYTES),
            context_bytes: word(page, grant_offset::CONTEXT_BYTES),
            cores_percent: half(page, grant_offset::CORES_PERCENT),
            policy,
            oversubscribe: flags & GRANT_OVERSUBSCRIBE != 0,
            mps: flags & GRANT_MPS != 0,
            claim_uid: Text::from_padded(take(page, grant_offset::CLAIM_UID))
                .map_err(GrantError::ClaimUid)?,
            id: Text::from_padded(take(page, grant_offset::ID)).map_err(GrantError::Id)?,
            sequence,
        };
        grant.check()?;
        Ok(grant)
    }

    /// Returns the writes that change the file `current` to this grant while containers read it.
    /// `self.sequence` is ignored.
    ///
    /// # Errors
    /// `current` is no grant of this version, or is one of another share, or this grant is out of
    /// range.
    pub fn update(&self, current: &[u8]) -> Result<GrantUpdate, GrantError> {
        // A host that was killed within a change left an odd number: all that it wrote is
        // replaced.
        let mut readable: [u8; GRANT_LEN] =
            current.try_into().map_err(|_| GrantError::Length { found: current.len() })?;
        let sequence = word(&readable, grant_offset::SEQUENCE);
        put(&mut readable, grant_offset::SEQUENCE, &(sequence & !1).to_le_bytes());
        let old = Self::parse(&readable)?;
        if (old.gpu_uuid, old.claim_uid, old.id) != (self.gpu_uuid, self.claim_uid, self.id) {
            return Err(GrantError::Identity);
        }
        let begin = sequence | 1;
        let page = Self { sequence: begin.wrapping_add(1), ..*self }.encode()?;
        let mut body = [0; GrantUpdate::BODY_LEN];
        body.copy_from_slice(&page[GrantUpdate::BODY_OFFSET..grant_offset::PUBLISHED]);
        Ok(GrantUpdate {
            begin: begin.to_le_bytes(),
            body,
            end: begin.wrapping_add(1).to_le_bytes(),
        })
    }

    fn flags(&self) -> u64 {
        let bit = |is_set, bit| if is_set { bit } else { 0 };
        bit(self.oversubscribe, GRANT_OVERSUBSCRIBE) | bit(self.mps, GRANT_MPS)
    }

    fn check(&self) -> Result<(), GrantError> {
        if self.memory_limit_bytes > MAX_MEMORY_BYTES {
            return Err(GrantError::MemoryLimit { bytes: self.memory_limit_bytes });
        }
        if self.cores_percent > 100 {
            return Err(GrantError::CoresPercent { percent: self.cores_percent });
        }
        Ok(())
    }
}

/// Three writes (`pwrite`, in this order, to the same inode) that change a grant under its readers:
/// `begin` at [`GrantUpdate::SEQUENCE_OFFSET`], `body` at [`GrantUpdate::BODY_OFFSET`], `end` at
/// [`GrantUpdate::SEQUENCE_OFFSET`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GrantUpdate {
    /// An odd sequence number: readers wait or keep their values.
    pub begin: [u8; 8],
    /// All bytes behind the sequence number, up to the published words.
    pub body: [u8; GrantUpdate::BODY_LEN],
    /// The next even sequence number.
    pub end: [u8; 8],
}

impl GrantUpdate {
    /// Offset of `begin` and `end`.
    pub const SEQUENCE_OFFSET: usize = grant_offset::SEQUENCE;
    /// Offset of `body`.
    pub const BODY_OFFSET: usize = grant_offset::MEMORY_LIMIT_BYTES;
    const BODY_LEN: usize = grant_offset::PUBLISHED - Self::BODY_OFFSET;
}

fn put(page: &mut [u8; GRANT_LEN], at: usize, bytes: &[u8]) {
    page[at..at + bytes.len()].copy_from_slice(bytes);
}

fn take<const N: usize>(page: &[u8; GRANT_LEN], at: usize) -> [u8; N] {
    let mut bytes = [0; N];
    bytes.copy_from_slice(&page[at..at + N]);
    bytes
}

fn word(page: &[u8; GRANT_LEN], at: usize) -> u64 {
    u64::from_le_bytes(take(page, at))
}

fn half(page: &[u8; GRANT_LEN], at: usize) -> u32 {
    u32::from_le_bytes(take(page, at))
}

#[cfg(test)]
mod tests;
