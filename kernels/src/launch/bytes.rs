//! Numbers, texts and lists as bytes, little endian, each list after its length.

use crate::error::RunError;

/// The number of elements that are encoded at a time.
const CHUNK: usize = 1 << 14;

/// Writes into memory.
#[derive(Debug, Default)]
pub(super) struct Writer {
    bytes: Vec<u8>,
}

impl Writer {
    pub(super) fn new() -> Self {
        Self::default()
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    pub(super) fn number(&mut self, n: u64) -> &mut Self {
        self.bytes.extend(n.to_le_bytes());
        self
    }

    pub(super) fn text(&mut self, text: &str) -> &mut Self {
        self.number(text.len() as u64);
        self.bytes.extend(text.as_bytes());
        self
    }

    pub(super) fn floats(&mut self, data: &[f32]) -> &mut Self {
        self.number(data.len() as u64);
        self.bytes.reserve(data.len() * 4);
        each_chunk(data, |bytes| self.bytes.extend(bytes));
        self
    }
}

/// Passes the bytes of `data` on, chunk by chunk.
pub(super) fn each_chunk(data: &[f32], mut take: impl FnMut(&[u8])) {
    let mut buffer = Vec::with_capacity(CHUNK.min(data.len()) * 4);
    for chunk in data.chunks(CHUNK) {
        buffer.clear();
        buffer.extend(chunk.iter().flat_map(|x| x.to_le_bytes()));
        take(&buffer);
    }
}

/// Decodes numbers; `None` where the bytes end within one.
pub(super) fn floats(bytes: &[u8]) -> Option<Vec<f32>> {
    let (message, rest) = bytes.as_chunks::<4>();
    rest.is_empty().then(|| message.iter().map(|&word| f32::from_le_bytes(word)).collect())
}

/// Reads the output of a [`Writer`]; other bytes are an error.
#[derive(Debug)]
pub(super) struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { rest: bytes }
    }

    pub(super) fn number(&mut self) -> Result<u64, RunError> {
        let (word, rest) = self.rest.split_first_chunk::<8>().ok_or_else(malformed)?;
        self.rest = rest;
        Ok(u64::from_le_bytes(*word))
    }

    pub(super) fn text(&mut self) -> Result<String, RunError> {
        let n = self.number()?;
        String::from_utf8(self.take(n, 1)?.to_vec()).map_err(|_| malformed())
    }

    pub(super) fn floats(&mut self) -> Result<Vec<f32>, RunError> {
        let n = self.number()?;
        floats(self.take(n, 4)?).ok_or_else(malformed)
    }

    /// A list, whose length comes first.
    pub(super) fn list<T>(
        &mut self,
        mut item: impl FnMut(&mut Self) -> Result<T, RunError>,
    ) -> Result<Vec<T>, RunError> {
        let n = self.number()?;
        // An item takes a byte at least, so a wrong length ends with the bytes.
        (0..n).map(|_| item(self)).collect()
    }

    /// Whether all bytes were read.
    pub(super) fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    /// Checks that all bytes were read.
    pub(super) fn end(self) -> Result<(), RunError> {
        if self.rest.is_empty() { Ok(()) } else { Err(malformed()) }
    }

    fn take(&mut self, n: u64, size: usize) -> Result<&'a [u8], RunError> {
        let n = usize::try_from(n).ok().and_then(|n| n.checked_mul(size)).ok_or_else(malformed)?;
        let (taken, rest) = self.rest.split_at_checked(n).ok_or_else(malformed)?;
        self.rest = rest;
        Ok(taken)
    }
}

/// The error of a malformed message.
pub(super) fn malformed() -> RunError {
    RunError::invalid("another process sent a malformed message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_data_is_read_back() {
        let mut writer = Writer::new();
        let data: Vec<f32> = (0..40_000).map(|n| n as f32 * 0.5).collect();
        writer.number(7).text("Ithaka").floats(&data).floats(&[f32::from_bits(0x7fc0_1234)]);
        let bytes = writer.into_bytes();
        let mut reader = Reader::new(&bytes);
        assert_eq!((reader.number().unwrap(), reader.text().unwrap().as_str()), (7, "Ithaka"));
        assert_eq!(reader.floats().unwrap(), data);
        assert_eq!(reader.floats().unwrap()[0].to_bits(), 0x7fc0_1234, "the bits of NaN are preserved");
        reader.end().unwrap();
    }

    #[test]
    fn truncated_data_and_wrong_lengths_are_refused() {
        let mut writer = Writer::new();
        writer.floats(&[1.0, 2.0]);
        let bytes = writer.into_bytes();
        assert!(Reader::new(&bytes[..15]).floats().is_err());
        assert!(Reader::new(&u64::MAX.to_le_bytes()).floats().is_err());
        assert!(Reader::new(&u64::MAX.to_le_bytes()).text().is_err());
        assert!(Reader::new(&u64::MAX.to_le_bytes()).list(Reader::number).is_err());
        assert!(Reader::new(&[0]).end().is_err());
        assert_eq!(floats(&[0; 5]), None);
    }
}
