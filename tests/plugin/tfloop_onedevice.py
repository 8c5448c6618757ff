"""The engine `onedevice`: TensorFlow's OneDeviceStrategy, on the device that ONEDEVICE names."""

import os

import tensorflow as tf

from loop.backends.strategy import StrategyBackend


class OneDevice(StrategyBackend):
    """All of tf.distribute, on one device: for looking for mistakes of a strategy without another device."""

    name = "onedevice"
    priority = 10

    @classmethod
    def available(cls, workers=1):
        if "ONEDEVICE" not in os.environ:
            return "set ONEDEVICE to the device that it shall use, such as cpu:0"
        return super().available(workers)

    def __init__(self):
        self.strategy = tf.distribute.OneDeviceStrategy(os.environ["ONEDEVICE"])
