//! Memory whose first element starts a cache line, so that no vector of a packed matrix lies in two.

/// Elements of a cache line.
const LINE: usize = 16;

/// Numbers from the start of a cache line on.
#[derive(Debug, Default)]
pub(in crate::cpu) struct Buffer {
    data: Vec<f32>,
    start: usize,
    n: usize,
}

impl Buffer {
    /// So many zeros.
    pub(in crate::cpu) fn zeros(n: usize) -> Self {
        let mut buffer = Self::default();
        buffer.resize(n);
        buffer
    }

    /// Makes room for `n` elements; what they are is left open.
    pub(in crate::cpu) fn resize(&mut self, n: usize) -> &mut [f32] {
        if self.data.len() < n + LINE {
            self.data.clear();
            self.data.resize(n + LINE, 0.0);
            // Where the distance is not to be had, vectors are merely slower.
            let distance = self.data.as_ptr().align_offset(LINE * size_of::<f32>());
            self.start = if distance <= LINE { distance } else { 0 };
        }
        self.n = n;
        self.get_mut()
    }

    /// The elements.
    pub(in crate::cpu) fn get(&self) -> &[f32] {
        &self.data[self.start..self.start + self.n]
    }

    /// The elements, to be written.
    pub(in crate::cpu) fn get_mut(&mut self) -> &mut [f32] {
        &mut self.data[self.start..self.start + self.n]
    }
}
