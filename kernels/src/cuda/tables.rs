//! Tables that kernels read, uploaded before a run; equal tables are uploaded once.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_device::program::TableId;
use ithaca_device::{Coordinates, DeviceProgram, Table};
use ithaca_ir::entity::Entity;

use super::arguments::Address;
use super::device::Device;
use super::error::CudaError;

/// The tables of a rank on its device, freed on drop.
pub(super) struct Tables<'d> {
    device: &'d dyn Device,
    /// The address of each table of the program; null for an empty table.
    addresses: Vec<Address>,
}

impl<'d> Tables<'d> {
    /// Uploads the tables of a rank.
    pub(super) fn new(
        device: &'d dyn Device,
        program: &DeviceProgram,
        at: &Coordinates,
    ) -> Result<Self, CudaError> {
        let mut tables = Tables { device, addresses: Vec::with_capacity(program.tables.len()) };
        let mut known: BTreeMap<Vec<u64>, Address> = BTreeMap::new();
        for table in program.tables.values() {
            let words: Vec<u64> = match table {
                Table::Integers(list) => list.at(at).iter().map(|n| n.at(at, 0).cast_unsigned()).collect(),
                Table::Reals(list) => list.at(at).clone(),
            };
            let address = match known.get(&words) {
                _ if words.is_empty() => Address::NONE,
                Some(&address) => address,
                None => {
                    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
                    let address = device.allocate(bytes.len() as u64)?;
                    known.insert(words, address);
                    // SAFETY: the memory was just allocated for as many bytes.
                    unsafe { device.upload(&bytes, address) }?;
                    address
                }
            };
            tables.addresses.push(address);
        }
        Ok(tables)
    }

    /// The address of a table.
    pub(super) fn at(&self, id: TableId) -> Address {
        self.addresses[id.index()]
    }
}

impl Drop for Tables<'_> {
    fn drop(&mut self) {
        let unique: BTreeSet<Address> = self.addresses.drain(..).filter(|&at| at != Address::NONE).collect();
        for at in unique {
            // SAFETY: the table was allocated here, and the kernels that use it have ended.
            unsafe { self.device.release(at) };
        }
    }
}
