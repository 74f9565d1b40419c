//! Lists of numbers that kernels read: uploaded before a run, once for each content.

use std::collections::BTreeMap;

use ithaca_device::program::TableId;
use ithaca_device::{Coordinates, DeviceProgram, Table};
use ithaca_ir::entity::Entity;

use super::arguments::Address;
use super::device::Device;
use super::error::CudaError;

/// The lists of a rank on its device, given back when dropped.
pub(super) struct Tables<'d> {
    device: &'d dyn Device,
    /// For each table of the program; none for a list without numbers.
    addresses: Vec<Address>,
}

impl<'d> Tables<'d> {
    /// Uploads the lists of a rank.
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

    /// Where the device has a list.
    pub(super) fn at(&self, id: TableId) -> Address {
        self.addresses[id.index()]
    }
}

impl Drop for Tables<'_> {
    fn drop(&mut self) {
        let mut own: Vec<Address> =
            self.addresses.iter().copied().filter(|&at| at != Address::NONE).collect();
        own.sort_unstable();
        own.dedup();
        for at in own {
            // SAFETY: it was allocated here; whoever launches kernels that use it waits for them before.
            unsafe { self.device.release(at) };
        }
    }
}
