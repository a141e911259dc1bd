"""Types of devices: what differs between them is one record, which plugins bring for devices that torch does not have.

Everything else in meshwright asks the record (`device_of`), so that no other module names a type of device.
"""

from meshwright_dtensor.devices.device import Device as Device
from meshwright_dtensor.devices.registry import autocast_types as autocast_types
from meshwright_dtensor.devices.registry import default_device as default_device
from meshwright_dtensor.devices.registry import device_of as device_of
from meshwright_dtensor.devices.registry import is_known as is_known
from meshwright_dtensor.devices.registry import moves as moves
from meshwright_dtensor.devices.registry import on_host as on_host
from meshwright_dtensor.devices.registry import replaced as replaced
from meshwright_dtensor.devices.registry import types_here as types_here
from meshwright_dtensor.devices.registry import unnamed_device as unnamed_device
from meshwright_dtensor.utils.host import HOST as HOST
