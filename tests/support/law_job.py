"""A job script for tests that kill the driver: trains `Gated` with the settings of the laws."""

import raytrain
from tests.laws.compare import LAW_SETTINGS
from tests.support.tasks import Gated

if __name__ == "__main__":
    raytrain.main(Gated, **LAW_SETTINGS)
