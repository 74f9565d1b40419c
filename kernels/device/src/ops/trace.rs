//! The records of a task on a rank: launches, products and copies, and the lists of numbers that kernels read.

use std::cell::{Cell, OnceCell, RefCell};
use std::rc::Rc;

use ithaca_ir::entity::Entity;

use crate::address::{Region, TableId};
use crate::argument::Pointer;
use crate::record::{Product, Record};

/// The records of a task on one rank.
#[derive(Debug, Default)]
pub(crate) struct Trace {
    records: RefCell<Vec<Record>>,
    lists: RefCell<Vec<List>>,
    /// Whether a record may depend on where in a tensor the part of the rank is, not on its size alone.
    pub(super) depends_on_place: Cell<bool>,
    /// Bytes of the workspace.
    pub(super) workspace: Cell<i64>,
}

/// Numbers that kernels read.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum List {
    Integers(Vec<i64>),
    Reals(Rc<Vec<u64>>),
}

impl Trace {
    /// The records, whose tables are numbered as the lists are, and the lists.
    pub(crate) fn into_parts(self) -> (Vec<Record>, Vec<List>) {
        (self.records.into_inner(), self.lists.into_inner())
    }

    /// Bytes of the workspace that the records use.
    pub(crate) fn workspace(&self) -> i64 {
        self.workspace.get()
    }

    /// Whether a record may depend on where in a tensor the part of the rank is.
    pub(crate) fn depends_on_place(&self) -> bool {
        self.depends_on_place.get()
    }

    pub(crate) fn add(&self, record: Record) {
        self.records.borrow_mut().push(record);
    }

    /// Makes the last two records a pair if they are products of one shape, of one matrix each.
    pub(crate) fn pair(&self) {
        let mut records = self.records.borrow_mut();
        if let [.., Record::Product(first), Record::Product(second)] = records.as_slice()
            && let Some(pair) = Product::pair(first, second)
        {
            let end = records.len() - 2;
            records.truncate(end);
            records.push(Record::Pair(Box::new(pair)));
        }
    }

    pub(super) fn list(&self, list: List) -> Pointer {
        let mut lists = self.lists.borrow_mut();
        lists.push(list);
        Pointer { region: Region::Table(TableId::new(lists.len() - 1)), bytes: 0 }
    }
}

/// Lists of a task that are the same for all ranks, made once.
#[derive(Debug, Default)]
pub(crate) struct Shared {
    pub(super) mask_strips: OnceCell<Rc<Vec<u64>>>,
}
