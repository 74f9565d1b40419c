//! Typed handles and the arenas they index.
//!
//! A handle is a `u32` that only its own arena accepts; it prints as the text form spells it.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Index, IndexMut};

/// A typed index: `K` of [`Arena<K, V>`].
pub trait Entity: Copy + Ord {
    /// The handle with this index.
    fn new(index: usize) -> Self;
    /// The index of this handle.
    fn index(self) -> usize;
}

/// Declares a handle type: its name, its documentation and the sigil that its debug form prints.
#[macro_export]
macro_rules! entity {
    ($(#[$doc:meta])* $name:ident, $sigil:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(u32);
        impl $crate::entity::Entity for $name {
            #[inline]
            fn new(index: usize) -> Self {
                Self(u32::try_from(index).expect("an arena holds fewer than 2^32 items"))
            }
            #[inline]
            fn index(self) -> usize {
                self.0 as usize
            }
        }
        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                write!(f, concat!($sigil, "{}"), self.0)
            }
        }
    };
}

/// An append-only store of `V`, addressed by `K`.
#[derive(Clone, PartialEq)]
pub struct Arena<K, V> {
    items: Vec<V>,
    key: PhantomData<K>,
}

impl<K: Entity, V> Arena<K, V> {
    /// An empty arena.
    pub fn new() -> Self {
        Self { items: Vec::new(), key: PhantomData }
    }

    /// Room for so many items more.
    pub fn reserve(&mut self, n: usize) {
        self.items.reserve_exact(n);
    }

    /// Stores `value` and returns its handle.
    pub fn push(&mut self, value: V) -> K {
        let id = K::new(self.items.len());
        self.items.push(value);
        id
    }

    /// The handle that the next [`push`](Self::push) will return.
    pub fn next(&self) -> K {
        K::new(self.items.len())
    }

    /// The item, or `None` when the handle is from elsewhere.
    #[inline]
    pub fn get(&self, id: K) -> Option<&V> {
        self.items.get(id.index())
    }

    /// Number of items.
    #[inline]
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether nothing was stored.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Handles and items, in the order they were stored.
    pub fn iter(&self) -> impl DoubleEndedIterator<Item = (K, &V)> + ExactSizeIterator {
        self.items.iter().enumerate().map(|(i, v)| (K::new(i), v))
    }

    /// Handles, in order.
    pub fn ids(&self) -> impl DoubleEndedIterator<Item = K> + ExactSizeIterator + use<K, V> {
        (0..self.items.len()).map(K::new)
    }

    /// Items, in order.
    pub fn values(&self) -> std::slice::Iter<'_, V> {
        self.items.iter()
    }

    /// Items, in order, to change.
    pub fn values_mut(&mut self) -> std::slice::IterMut<'_, V> {
        self.items.iter_mut()
    }
}

impl<K: Entity, V> Default for Arena<K, V> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K: Entity, V> Index<K> for Arena<K, V> {
    type Output = V;
    #[inline]
    fn index(&self, id: K) -> &V {
        &self.items[id.index()]
    }
}

impl<K: Entity, V> IndexMut<K> for Arena<K, V> {
    #[inline]
    fn index_mut(&mut self, id: K) -> &mut V {
        &mut self.items[id.index()]
    }
}

impl<K, V: fmt::Debug> fmt::Debug for Arena<K, V> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.items).finish()
    }
}

impl<K: Entity, V> FromIterator<V> for Arena<K, V> {
    fn from_iter<I: IntoIterator<Item = V>>(iter: I) -> Self {
        Self { items: iter.into_iter().collect(), key: PhantomData }
    }
}
