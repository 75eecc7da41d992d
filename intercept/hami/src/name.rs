//! Names of variables that have an index.

/// The longest name, an underscore and two digits.
const ROOM: usize = 48;

/// A name.
pub(crate) struct Name {
    bytes: [u8; ROOM],
    length: usize,
}

impl Name {
    /// The name for one of at most a hundred GPUs.
    pub(crate) fn of_gpu(base: &[u8], gpu: usize) -> Self {
        let mut name = Self { bytes: [0; ROOM], length: 0 };
        base.iter().for_each(|byte| name.push(*byte));
        name.push(b'_');
        if gpu >= 10 {
            name.push(digit(gpu / 10));
        }
        name.push(digit(gpu));
        name
    }

    fn push(&mut self, byte: u8) {
        if let Some(place) = self.bytes.get_mut(self.length) {
            *place = byte;
            self.length += 1;
        }
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.length).unwrap_or_default()
    }
}

fn digit(number: usize) -> u8 {
    b'0' + (number % 10) as u8
}
